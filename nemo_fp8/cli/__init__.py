"""``nemo-fp8``: the command line. Commands only parse, call the library, and print.

Every command takes ``--json``. Exit codes: 0 yes or done; 1 the answer is no (contracts differ, a machine cannot, an
error was found); 2 wrong arguments or any PrecisionError; 128 + n ended by signal n. Heavy modules are imported inside
the command that needs them.
"""

from __future__ import annotations

import sys
import warnings

import typer

from nemo_fp8.cli.compare import compare
from nemo_fp8.cli.contracts import check, diff, explain, list_presets, render
from nemo_fp8.cli.export import export
from nemo_fp8.cli.inspect import inspect
from nemo_fp8.cli.machines import doctor, lint, memory
from nemo_fp8.cli.mismatch import mismatch
from nemo_fp8.cli.printing import print_json, print_problems
from nemo_fp8.cli.rl import rl_compare
from nemo_fp8.cli.run import COMMANDS_WORDS, run
from nemo_fp8.cli.serve import VLLM_WORDS, serve
from nemo_fp8.errors import PrecisionError
from nemo_fp8.lifetime import orderly

app = typer.Typer(
    help="One FP8 or NVFP4 precision contract for NeMo / Megatron training and vLLM rollout.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(list_presets)
app.command()(explain)
app.command()(diff)
app.command()(render)
app.command()(check)
app.command()(doctor)
app.command()(lint)
app.command()(memory)
app.command()(inspect)
app.command()(compare)
app.command()(export)
app.command()(mismatch)
app.command()(rl_compare)
app.command(context_settings=VLLM_WORDS)(serve)
app.command(context_settings=COMMANDS_WORDS)(run)


def main() -> None:
    """Run the command line; a PrecisionError becomes what, why and remedy on stderr, and exit code 2."""
    # torch warns about NVIDIA's packages when it is imported, which does not concern a user of these commands.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    with orderly():
        try:
            app()
        except PrecisionError as error:
            if "--json" in sys.argv:
                print_json({"error": [p.to_dict() for p in error.problems]})
            else:
                print_problems(error.problems)
            sys.exit(2)
