"""Starting real servers, and asking them over HTTP."""

import json
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack

import torch

from nemo_fp8.rollout import serve
from support.processes import free_port
from support.rollout.engines import prompts
from support.rollout.models import VOCABULARY

MORE = ("--max-model-len", "256", "--enforce-eager", "--served-model-name", "m")
PROMPT = [5, 6, 7, 8]  # four tokens, which once ended a worker that had not asked for AMX


class Served:
    """A server of its own, to be asked as an engine of this process is."""

    def __init__(self, folder, precision, *more, port=None, **options):
        words = (*MORE, "--seed", "0", "--max-logprobs", "-1", *more)
        server = serve.server_for(str(folder), precision, port=port or free_port(), more=words, **options)
        self.url, self.end = server.url, ExitStack()
        self.process = self.end.enter_context(serve.running(server))
        serve.wait_until_ready(server, self.process)

    def log_probs(self, count, length):
        """Those of :func:`rollout.engines.log_probs`."""
        rows = []
        for prompt in prompts(count, length):
            wanted = {
                "model": "m",
                "prompt": prompt["prompt_token_ids"],
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": -1,
            }
            status, answer = ask(self.url, body=wanted)
            assert status == 200, answer
            places = answer["choices"][0]["prompt_logprobs"][1:]
            rows.append([[place[str(token)]["logprob"] for token in range(VOCABULARY)] for place in places])
        return torch.tensor(rows)

    def stop(self):
        self.end.close()


def ask(url, path="/v1/completions", body=None, token=None, **headers):
    """Status and answer of a POST."""
    said = (
        {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"}) | headers
    )
    request = urllib.request.Request(url + path, headers=said, data=json.dumps(body or {}).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def complete(url, token=None):
    """Status, and the log-probs of four tokens that the model says after a prompt."""
    wanted = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    status, answer = ask(url, body=wanted, token=token)
    return status, answer["choices"][0]["logprobs"]["token_logprobs"] if status == 200 else answer


def complete_offline(llm):
    """The same of an engine of this process."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    asked = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1)
    (said,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)[0].outputs
    return [place[token].logprob for token, place in zip(said.token_ids, said.logprobs, strict=True)]


def beyond_loopback():
    """An address of this machine that others reach; None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks which address would be taken
        except OSError:
            return None
        return probe.getsockname()[0]
