"""Options that several commands have."""

from pathlib import Path

import torch


def add_device(parser):
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")


def add_kept(parser):
    parser.add_argument(
        "--from", type=Path, nargs="+", dest="kept", metavar="FILE", help="load these kept runs instead of measuring"
    )


def names_in(text, known, what, error) -> list[str]:
    """Split a comma-separated option. Calls ``error`` if a name is unknown."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            error(f"unknown {what} {name}: choose from {', '.join(known)}")
    return names


def described(names) -> str:
    """Return a table of names as a help text."""
    return "; ".join(f"{name}: {what}" for name, what in names.items())
