"""The layout of the processes of a run: by how many of them the batch, the layers and the sequences are divided."""

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Layout(NamedTuple):
    """The number of processes that divide the batch (dp), the matrices of each layer (tp) and the sequences (cp).

    :func:`make_mesh` has another order of the dimensions.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1

    @classmethod
    def parse(cls, text: str | None, processes: int) -> "Layout":
        """Read a layout such as "dp=2,tp=2"; the size of a missing name is 1. None divides only the batch.

        Raises:
            ValueError: if a name is unknown or repeated, a size is not an integer of at least 1, or the product of the
                sizes is not the number of processes.
        """
        if text is None:
            return cls(dp=processes)
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name not in cls._fields:
                raise ValueError(f"layout {text!r}: the name {name!r} is unknown, must be one of {_NAMES}")
            if name in sizes:
                raise ValueError(f"layout {text!r}: {name} is repeated")
            if not (size.isascii() and size.isdecimal() and int(size) >= 1):
                raise ValueError(f"layout {text!r}: {name} is {size!r}, must be an integer of at least 1")
            sizes[name] = int(size)
        layout = cls(**sizes)
        if (product := layout.dp * layout.tp * layout.cp) != processes:
            raise ValueError(
                f"layout {text!r} is for {product} process{'es' * (product > 1)}, but there "
                f"{'are' if processes > 1 else 'is'} {processes}"
            )
        return layout


_NAMES = ", ".join(Layout._fields)


def make_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Make the mesh of all processes, with the dimensions "dp", "cp" and "tp" from the outermost to the innermost.

    Neighbouring processes, which have the fastest links, divide the layers.
    """
    return init_device_mesh(device_type, (layout.dp, layout.cp, layout.tp), mesh_dim_names=("dp", "cp", "tp"))
