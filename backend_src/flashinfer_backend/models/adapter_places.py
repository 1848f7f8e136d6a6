# SPDX-License-Identifier: Apache-2.0
"""Places for adapters on a rank's device, next to the weights that they add to."""

from itertools import accumulate

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from flashinfer_backend.models.adapters import VOCABULARY, Adapter, AdapterError, changed, replaced
from flashinfer_backend.models.spec import Product
from flashinfer_backend.models.transformer import Transformer
from flashinfer_backend.models.weights import centred
from flashinfer_backend.ops.weight import LowRank, Weight

LEAST_RANK = 16  # that the kernels compute; they want a power of two


class AdapterWeights:
    """An adapter on the host, for a rank's share: (down, up) of each piece, in the model's type."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, pin: bool) -> None:
        """Reads the file. pin: memory that is copied to a GPU without a wait. Raises AdapterError."""
        self.adapter = adapter
        self.values: list[tuple[Tensor, Tensor]] = []
        try:
            # Never mapped: a file that is cut meanwhile would end the process. Nor more than it had.
            with adapter.file.open("rb") as file:
                tensors = safetensors.torch.load(file.read(adapter.state[1][0]))
            for piece in adapter.pieces:
                part, order = piece.source.part, piece.source.order
                down = tensors[piece.down].to(dtype)
                up = tensors[piece.up].float() * piece.scale
                up = (centred(up) if piece.centred else up).to(dtype)
                # Of the whole module, so that all ranks find the same.
                if not (down.isfinite().all() and up.isfinite().all()):
                    raise AdapterError(f"{adapter.file} has numbers that are not finite")
                down, up = down[:, part.columns], up[part.rows]
                if order:
                    up = up.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1)
                pair = down.contiguous(), up.contiguous()
                self.values.append((pair[0].pin_memory(), pair[1].pin_memory()) if pin else pair)
        except (OSError, KeyError, SafetensorError) as error:
            raise AdapterError(f"{adapter.file} cannot be read: {error}") from None
        if changed(adapter):
            raise AdapterError(replaced(adapter))

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for pair in self.values for value in pair)


def room(product: Product, count: int, most_rank: int, dtype: torch.dtype, device: torch.device) -> LowRank:
    """Zeros for `count` adapters of a product, of ranks up to `most_rank`."""
    rank = max(LEAST_RANK, 1 << (most_rank - 1).bit_length())
    rows, columns = product.shape
    ends = tuple(accumulate(sum(source.rows for source in run) for run in product.runs))
    down, up = (
        torch.zeros(shape, dtype=dtype, device=device)
        for shape in ((count, len(ends), rank, columns), (count, rows, rank))
    )
    return LowRank(down, up, ends)


class AdapterPlaces:
    """Room for `count` adapters of ranks up to `most_rank` in a model's weights. Steps name a place. What a
    place holds can be replaced at any time while no step names it."""

    def __init__(self, model: Transformer, count: int, most_rank: int, vocabulary: bool) -> None:
        """vocabulary: also in its embedding and head."""
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._rooms: dict[tuple[int, str], LowRank] = {}
        for number, layer in enumerate(model.layers):
            for product in layer.spec.adaptable:
                weight: Weight = getattr(layer, product.name)
                weight.adapters = room(product, count, most_rank, model.dtype, model.device)
                self._rooms[number, product.name] = weight.adapters
        for product in model.spec.vocabulary if vocabulary else ():
            own = room(product, count, most_rank, model.dtype, model.device)
            self._rooms[VOCABULARY, product.name] = own
            if product.name == "lm_head":
                model.lm_head.adapters = own
            else:
                model.embedding_adapters = own

    @torch.inference_mode()
    def install(self, place: int, weights: AdapterWeights, after: torch.cuda.Event | None) -> None:
        """Put an adapter into a place. On a GPU it is copied next to what runs there, once the device has
        come to `after`, and waited for."""
        with torch.cuda.stream(self._stream):  # None: no GPU
            if after is not None:
                after.wait()
            for adapters in self._rooms.values():
                adapters.down[place].zero_()
                adapters.up[place].zero_()
            for piece, (down, up) in zip(weights.adapter.pieces, weights.values, strict=True):
                adapters = self._rooms[piece.layer, piece.product]
                rank = len(down)
                adapters.down[place, piece.part, :rank].copy_(down, non_blocking=True)
                adapters.up[place, piece.rows, :rank].copy_(up, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
