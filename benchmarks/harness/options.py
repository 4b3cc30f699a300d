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
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            error(f"unknown {what} {name}: choose from {', '.join(known)}")
    return names


def described(names) -> str:
    return "; ".join(f"{name}: {what}" for name, what in names.items())
