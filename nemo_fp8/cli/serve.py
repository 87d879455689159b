"""``nemo-fp8 serve``: vLLM's OpenAI server with an FP8 rollout."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from nemo_fp8.cli.options import Json
from nemo_fp8.terminal import print_json, print_notes

# What follows our own options is vLLM's.
VLLM_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A BF16 checkpoint: a folder, or its name on the Hub.", show_default=False)],
    precision: Annotated[str, typer.Option("--precision", metavar="NAME", help="A preset, or a YAML file.")],
    host: Annotated[str, typer.Option("--host", help="Where to listen. Beyond this machine it asks for a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port.")] = 8000,
    activations: Annotated[
        str, typer.Option("--activations", metavar="WORD", help="kernel, or emulated: quantize them where the kernel (a CPU's) does not.")
    ] = "kernel",
    kernel: Annotated[str, typer.Option("--kernel", metavar="WORD", help="auto, or decode: multiply with decoded weights.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Serve a model with an OpenAI API, its weights quantized as the precision says.

    Options that are not listed here go to vLLM, such as --max-model-len 4096. The token is read from VLLM_API_KEY.
    """
    from nemo_fp8.named import load
    from nemo_fp8.rollout import serve
    from nemo_fp8.rollout.access import TOKEN

    token = os.environ.get(TOKEN) or None
    server = serve.server_for(
        model, load(precision), host=host, port=port, token=token, activations=activations, kernel=kernel, more=context.args
    )
    if as_json:
        print_json({"url": server.url, "command": list(server.words), "environment": dict(server.variables), "token": token is not None})
    elif dry_run:
        sys.stdout.write(f"{server}\n")
    else:
        print_notes([f"{server.url} serves {model}{' to who brings the token' if token else ''}; Ctrl-C ends it."])
    if not dry_run:
        raise typer.Exit(serve.run(server))
