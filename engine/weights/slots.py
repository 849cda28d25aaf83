"""How a layer says what it is made of. The loader reads it; no layer touches a file.

layer.slots()  ->  [Slot(sources=[Source("...q_proj.weight", (576, 576)), Source("...k_proj..."), ...])]
loader         ->  allocates each slot, reads its sources into place one below the other
layer.take([tensor, ...])   keeps them, packed or not
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, and the part of it that belongs here.

    `region` indexes the stored tensor; () is all of it. Only what it names is read.
    """

    name: str
    shape: Shape  # of the stored tensor
    region: tuple[slice, ...] = ()

    @property
    def region_shape(self) -> Shape:
        sizes = [
            len(range(*s.indices(size))) for s, size in zip(self.region, self.shape, strict=False)
        ]
        return (*sizes, *self.shape[len(sizes) :])


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a layer: its sources stacked along the first dimension."""

    layer: str  # for people: the layer's name in the model
    sources: tuple[Source, ...]

    @property
    def shape(self) -> Shape:
        shapes = [source.region_shape for source in self.sources]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


class WeightedLayer(Protocol):
    """A layer with weights of its own."""

    def slots(self) -> list[Slot]:
        """What to load, in the order in which `take` wants it."""

    def take(self, tensors: list[Tensor]) -> None:
        """Keep the loaded tensors, one per slot, in the final dtype and on the final device."""
