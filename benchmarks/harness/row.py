"""One measured case."""

from dataclasses import asdict, dataclass, field

from benchmarks.harness.timing import Time

COMPUTE_BOUND = 50  # flops per byte; above it the rate is in TFLOP/s instead of GB/s
TIE = 0.995  # smaller differences are noise: two runs of one kernel may differ by this factor


@dataclass
class Row:
    """The times of our kernel, of the copy and of each correct baseline, and the faults of all other variants."""

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
        rates = {n: round(self.rate(n), 1) for n in self.times if n != "copy" or self.unit == "GB/s"}
        return {**asdict(self), "times": {n: list(t) for n, t in self.times.items()}, "rates": rates}

    @property
    def key(self):
        return self.name, self.shape, self.dtype

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.intensity > COMPUTE_BOUND else "GB/s"

    def rate(self, name) -> float:
        work = self.flops * 1e-12 if self.unit == "TFLOP/s" else self.bytes * 1e-9
        return work / self.times[name].median

    @property
    def peers(self) -> list[str]:
        return [name for name in (*self.times, *self.faults) if name not in ("ours", "copy")]

    def ratio(self, name) -> float | None:
        if name not in self.times or "ours" not in self.times:
            return None
        return self.times[name].median / self.times["ours"].median

    @property
    def share(self) -> float | None:
        return self.ratio("copy") if self.unit == "GB/s" else None

    @property
    def fastest(self) -> str | None:
        return min((p for p in self.peers if p in self.times), key=lambda p: self.times[p].median, default=None)

    @property
    def ahead(self) -> list[str]:
        ours = self.times["ours"].median if "ours" in self.times else float("inf")
        return [p for p in self.peers if p in self.times and self.times[p].median < TIE * ours]
