"""`dspark`: one entry, one module per subcommand, imported on use.

Errors a user can act on are one line on stderr and exit code 2; anything else is a fault of ours
and keeps its traceback (exit code 1).
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from dspark_trt.tools.options import Parser

DISTRIBUTION = "dspark-trt"
# Subcommand, also the module in tools/ -> its line in the help.
SUBCOMMANDS = {
    "build": "checkpoint (and drafter) -> engine directory",
    "info": "what an engine directory holds",
    "generate": "prompts -> text, as a stream or a batch",
    "bench": "speed with and without the drafter, and beside other runtimes",
    "train": "a drafter for a target, from data that the target writes",
}
PACKAGES = {"train": "train.command"}  # subcommand -> its module, where it is not of its name
# Printed as one line. Named and not imported, so that no subcommand loads another's libraries.
PLAIN_ERRORS = frozenset(
    {
        "dspark_trt.build.config:ConfigError",
        "dspark_trt.build.source:CheckpointError",
        "dspark_trt.runtime.budget:PolicyError",
        "dspark_trt.runtime.engine_dir:EngineDirError",
        "dspark_trt.runtime.sampling_params:RequestError",
        "dspark_trt.runtime.tokenizer:TokenizerError",
        "dspark_trt.tools.extras:MissingExtraError",
        "dspark_trt.tools.output_files:OutputError",
        "dspark_trt.tools.peers:PeerError",
        "dspark_trt.tools.prompts:PromptsError",
        "dspark_trt.tools.train.config:TrainError",
    }
)
EXAMPLES = """examples:
  dspark build --model SmolLM2-135M-Instruct.Q4_1.gguf --output engines/smollm2
  dspark info engines/smollm2
  dspark generate engines/smollm2 --chat --prompt "Why is the sky blue?"

`dspark COMMAND --help` explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dspark`; the exit code."""
    open_missing_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, rest = split(arguments)
    try:
        if not rest or rest[0].startswith("-"):
            return usage(rest)
        if rest[0] not in SUBCOMMANDS:
            return unknown(rest[0])
        logging.basicConfig(format="dspark: %(levelname)s: %(message)s")
        name = PACKAGES.get(rest[0], rest[0])
        module = importlib.import_module(f"dspark_trt.tools.{name}")
        code = module.main(rest[1:])
        sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:  # the reader left: there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = explanation(error)
        if line is None or "--traceback" in options:
            raise
        print(f"dspark: error: {line}", file=sys.stderr)
        return 2


def open_missing_streams() -> None:
    """Send what goes to a closed stdout or stderr nowhere, and keep their numbers from others.

    Python has None for such a stream, which `print` takes for stdout; and the next file that is
    opened would get its number, and with it what a library prints.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options before the subcommand that are for `dspark` itself, and the rest."""
    if arguments[:1] == ["--traceback"]:
        return arguments[:1], arguments[1:]
    return [], arguments


def usage(arguments: list[str]) -> int:
    """Answer `--help` and `--version`; without arguments the help is an error."""
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  {name:{width}}  {text}" for name, text in SUBCOMMANDS.items())
    parser = Parser(
        prog="dspark",
        usage="dspark [--version] [--traceback] COMMAND ...",
        description=f"DSpark speculative decoding on engines built ahead.\n\ncommands:\n{listed}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"dspark {metadata.version(DISTRIBUTION)}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    parser.parse_args(arguments)
    return 2


def unknown(command: str) -> int:
    """Say that there is no such subcommand, and which is near."""
    near = difflib.get_close_matches(command, SUBCOMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SUBCOMMANDS)}"
    print(f"dspark: error: no command {command!r}: {hint}", file=sys.stderr)
    return 2


def explanation(error: Exception) -> str | None:
    """The line that explains `error` to its user, or None if it is a fault of ours."""
    text = printable(str(error))
    if any(f"{c.__module__}:{c.__qualname__}" in PLAIN_ERRORS for c in type(error).__mro__):
        return text
    if isinstance(error, MemoryError):
        needed = f" ({text})" if text else ""
        return f"out of memory{needed}: lower the limits, quantize, or use a larger machine"
    if isinstance(error, OSError) and error.errno is not None:
        where = f" {printable(os.fsdecode(error.filename))}" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk while writing{where or ' a file'}: free some space"
        return f"{error.strerror}:{where}" if where else text
    return None


def printable(text: str) -> str:
    """`text` on one line; what would steer a terminal is shown as '?'."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "?" for char in line)


if __name__ == "__main__":
    raise SystemExit(main())
