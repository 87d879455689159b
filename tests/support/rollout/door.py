"""A server's door with an engine behind it that writes down what is asked of it, and an application that says yes to
everything."""

import json

from nemo_fp8.rollout.refit.door import RefitEndpoints

ROUTE = "/nemo_fp8/refit"


class Engine:
    """What the door asks of vLLM's client, and an answer of one worker to each method."""

    errored = False  # vLLM's word for dead

    def __init__(self, **answers):
        self.asked = []
        self.forgets, self.paused = True, False
        self.answers = {"begin": {"accepted": True, "mixed": ""}, "abandon": {"mixed": ""}} | answers

    async def collective_rpc(self, method, args):
        self.asked.append(method.removeprefix("nemo_fp8_refit_"))
        answer = self.answers.get(self.asked[-1], {})
        return [await answer() if callable(answer) else answer]

    async def pause_generation(self, mode):
        self.asked.append(f"pause {mode}")
        self.paused = True

    async def resume_generation(self):
        self.asked.append("resume")
        self.paused = False

    async def is_paused(self):
        return self.paused

    async def reset_prefix_cache(self, reset_running_requests, reset_connector):
        self.asked.append("forget")
        return self.forgets and reset_running_requests and reset_connector

    async def reset_encoder_cache(self):
        pass

    async def update_weight_version(self, version):
        self.version = version

    async def get_weight_version(self):
        return self.version


class Door:
    """A server's door, with an application behind it that says yes to everything."""

    def __init__(self, engine, token=""):
        self.engine, self.passed = engine, []
        self.door = RefitEndpoints(self._app)
        self.door.token = token
        self.state = type("State", (), {"engine_client": engine})

    async def _app(self, scope, receive, send):
        self.passed.append(scope.get("path"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def knock(
        self,
        path,
        body=b"{}",
        client="127.0.0.1",
        method="POST",
        kind="http",
        root_path="",
        server=("127.0.0.1", 8000),
        **headers,
    ):
        """Status and answer."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent, parts = [], [text[: len(text) // 2], text[len(text) // 2 :]]
        said = {"content-length": str(len(text))} | headers

        async def receive():
            return (
                {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
                if parts
                else {"type": "http.disconnect"}
            )

        async def send(message):
            sent.append(message)

        scope = {
            "type": kind,
            "path": path,
            "root_path": root_path,
            "method": method,
            "client": client and (client, 5),
            "server": server,
            "app": type("App", (), {"state": self.state}),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in said.items()],
        }
        await self.door(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def push(self, method, number="a", **message):
        return await self.knock(f"{ROUTE}/{method}", {"push": number, **message})
