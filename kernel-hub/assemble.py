"""Writes the folder that kernel-builder builds: this folder, and the sources that build.toml names.

python kernel-hub/assemble.py FOLDER
cd FOLDER && git init && git add . && kernel-builder build-and-copy
"""

import json
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parent


def assemble(folder: Path) -> None:
    """Write the folder, which must not exist."""
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("assemble.py", "__pycache__"))
    shutil.copy(SOURCES / "LICENSE", folder)

    def expand(found: re.Match) -> str:
        files = []
        for pattern in re.findall('"([^"]*)"', found[1]):
            root = HERE if pattern.startswith("torch-ext") else SOURCES
            files += (names := sorted(str(path.relative_to(root)) for path in root.glob(pattern)))
            if not names:
                raise ValueError(f"build.toml: no file matches {pattern}")
        for name in files:
            if not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(SOURCES / name, folder / name)
        return f"src = {json.dumps(files, indent=4)}"

    build = (HERE / "build.toml").read_text()
    build = re.sub(r"^src = \[(.*?)\]", expand, build, flags=re.M | re.S)
    (folder / "build.toml").write_text(build.split("\n\n", 1)[1])  # without the comment about patterns


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
