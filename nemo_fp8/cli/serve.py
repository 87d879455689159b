"""``nemo-fp8 serve``: vLLM's OpenAI server with an FP8 rollout."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from nemo_fp8.cli.options import Json
from nemo_fp8.cli.printing import print_json, print_notes, print_problems
from nemo_fp8.errors import PrecisionError, Problem

# Options that are not ours belong to vLLM.
VLLM_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}
# vLLM's options that restrict access by themselves: its own key, or a socket with permissions of the file system.
ASK_BY_THEMSELVES = ("--api-key", "--uds")
ENDED = Problem(
    "The server ended, and nobody had told it to.",
    "vLLM ends so, with code 0, when its EngineCore or one of its workers died; its output above says of what.",
    "Mend that, and start it again.",
)


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A BF16 checkpoint: a folder, or its name on the Hub.", show_default=False)
    ],
    precision: Annotated[str, typer.Option("--precision", metavar="NAME", help="A preset, or a YAML file.")],
    host: Annotated[
        str, typer.Option("--host", help="Where to listen. Beyond this machine it asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port.")] = 8000,
    activations: Annotated[
        str,
        typer.Option(
            "--activations",
            metavar="WORD",
            help="kernel, or emulated: quantize them where the kernel (a CPU's) does not.",
        ),
    ] = "kernel",
    kernel: Annotated[
        str, typer.Option("--kernel", metavar="WORD", help="auto; codes or decode: FP32 products on any CPU.")
    ] = "auto",
    unquantized: Annotated[
        str,
        typer.Option(
            "--unquantized", metavar="WORD", help="packed, or rows: BF16 weights as they lie in a checkpoint."
        ),
    ] = "packed",
    no_token: Annotated[bool, typer.Option("--no-token", help="Let every user of this machine push weights.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a model with an OpenAI API, its weights quantized as the precision says.

    Options that are not listed here go to vLLM, such as --max-model-len 4096. A token for everything is read from
    VLLM_API_KEY. Without one a token is drawn for pushes of weights alone, into a file that only you can read, where
    Refit(url) finds it.
    """
    from nemo_fp8.contract.naming import load
    from nemo_fp8.rollout import serve
    from nemo_fp8.rollout.access import PUSH_TOKEN, TOKEN, is_loopback
    from nemo_fp8.rollout.token_file import drawn_token

    token = os.environ.get(TOKEN) or None
    if token and no_token:
        raise PrecisionError(
            f"--no-token, and a token in {TOKEN}.", "One says that there is none.", f"Leave one out: unset {TOKEN}."
        )
    told = token or os.environ.get(PUSH_TOKEN) or any(word.split("=")[0] in ASK_BY_THEMSELVES for word in context.args)
    draws = is_loopback(host) and not (told or no_token or dry_run)
    with drawn_token(host, port) if draws else nullcontext((None, None)) as (drawn, file):
        server = serve.server_for(
            model,
            load(precision),
            host=host,
            port=port,
            token=token,
            push_token=drawn,
            activations=activations,
            kernel=kernel,
            unquantized=unquantized,
            more=context.args,
        )
        if as_json:
            words = {"command": list(server.words), "environment": dict(server.variables)}
            print_json({"url": server.url, **words, "token": token is not None, "token_file": file and str(file)})
        elif dry_run:
            sys.stdout.write(f"{server}\n")
        else:
            notes = [f"{server.url} serves {model}{' to who brings the token' if token else ''}; Ctrl-C ends it."]
            if file:
                notes.append(f"Your own Refit({server.url!r}) may push weights: it finds the token in {file}.")
            elif not told:
                notes.append("Every user of this machine may push weights into it, and every program.")
            print_notes(notes)
        if not dry_run:
            code = serve.run(server)
            if code == 0:
                print_problems([ENDED])
            raise typer.Exit(code or 1)
