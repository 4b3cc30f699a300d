"""One measured case, as it is shown, drawn, compared and kept."""

from dataclasses import asdict, dataclass, field

from benchmarks.harness.timing import Time

COMPUTE_BOUND = 50  # flops a byte: what lies above is held against matrix products, not against copies
TIE = 0.995  # two runs of one kernel differ by as much


@dataclass
class Row:
    """The times of ours, of the copy and of each peer that ran and was right; for the others, why there is none."""

    op: str
    name: str
    shape: str
    dtype: str
    bytes: int
    flops: int
    times: dict[str, Time]
    faults: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, data):
        data = {name: value for name, value in data.items() if name != "rates"}
        return cls(**{**data, "times": {name: Time(*time) for name, time in data["times"].items()}})

    def dump(self) -> dict:
        """As JSON; the rates stand there for readers alone."""
        rates = {n: round(self.rate(n), 1) for n in self.times if n != "copy" or self.unit == "GB/s"}
        return {**asdict(self), "times": {n: list(t) for n, t in self.times.items()}, "rates": rates}

    @property
    def key(self):
        return self.name, self.shape, self.dtype

    @property
    def intensity(self) -> float:
        """Flops a byte."""
        return self.flops / self.bytes

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.intensity > COMPUTE_BOUND else "GB/s"

    def rate(self, name) -> float:
        """In ``unit``, of the fewest bytes or of the flops."""
        work = self.flops * 1e-12 if self.unit == "TFLOP/s" else self.bytes * 1e-9
        return work / self.times[name].median

    @property
    def share(self) -> float | None:
        """How fast ours is beside a copy of as many bytes."""
        if "copy" not in self.times or "ours" not in self.times:
            return None
        return self.times["copy"].median / self.times["ours"].median

    @property
    def peers(self) -> list[str]:
        return [name for name in (*self.times, *self.faults) if name not in ("ours", "copy")]

    def beside(self, peer) -> float | None:
        """How many times as fast ours is as the peer."""
        if peer not in self.times or "ours" not in self.times:
            return None
        return self.times[peer].median / self.times["ours"].median

    @property
    def ahead(self) -> list[str]:
        """The peers that are faster than ours."""
        ours = self.times["ours"].median if "ours" in self.times else float("inf")
        return [p for p in self.peers if p in self.times and self.times[p].median < TIE * ours]
