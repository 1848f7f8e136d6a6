# SPDX-License-Identifier: Apache-2.0
"""Fill a Transformer from the safetensors files of a checkpoint, or with random numbers."""

import functools
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flashinfer_backend.core.progress import telling
from flashinfer_backend.core.values import some
from flashinfer_backend.models.checkpoint_kind import ADAPTER_CONFIG, INDEX, SINGLE, weight_files
from flashinfer_backend.models.safetensors_file import Header, state
from flashinfer_backend.models.spec import ModelSpec, Norm, Product
from flashinfer_backend.models.transformer import AttentionLayer, DeltaLayer, Layer, Transformer
from flashinfer_backend.models.upload import FileRange, Uploader
from flashinfer_backend.ops import mxfp4
from flashinfer_backend.ops.fp8 import E4M3
from flashinfer_backend.ops.weight import ALL, BYTES, DENSE, FLOATS, Int4, Mxfp4, Stored, Weight, positive

# Tables that some checkpoints store and that are computed here from config.json.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
# What a weight is multiplied by in a checkpoint, by its format; without one, its elements are scaled
# themselves.
SCALES = ("weight_scale", "weight_scale_inv", "scales")
PACKED = (".qweight", ".weight_packed")  # ends of names of matrices of 4 bits
SMALL = 1 << 16  # bytes: norms and scales, of which some are looked at on the host
# Of keys' and values' scales: compressed-tensors', ModelOpt's, and older ones of compressed-tensors.
KV_SCALE_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")

log = logging.getLogger(__name__)


class WeightsError(ValueError):
    """The checkpoint's tensors do not fit the model that its config.json describes."""


class Model(Protocol):
    """What is filled: a Transformer, or a drafter."""

    device: torch.device
    dtype: torch.dtype

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def layers(self) -> Sequence[Layer]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


def load_weights(
    model: Model,
    model_dir: str | Path,
    load_format: str = "auto",
    seed: int = 0,
    targets: dict[str, Stored] | None = None,
) -> None:
    """Fill the model's weights in place.

    load_format "auto" reads model.safetensors, or without one the shards that model.safetensors.index.json
    names, one tensor at a time into the fused weights, converted to the model's dtype, or quantised where the
    weight's format says so; before, it looks at the names, shapes and types of all. "dummy" draws them from
    N(0, initializer_range) keyed by seed and rank (norms 1, biases 0) and does not look at model_dir.
    targets: what fills what; default: destinations(model), of a Transformer.

    Raises FileNotFoundError for a missing file and WeightsError for tensors that cannot be read, are missing,
    unexpected, of another shape or of another type than the format of their weight has.
    """
    if load_format == "dummy":
        _fill_randomly(model, seed)
    elif load_format == "auto":
        if targets is None:
            assert isinstance(model, Transformer)
            targets = destinations(model)
        _load_safetensors(model, Path(model_dir), targets)
    else:
        raise ValueError(f"load_format {load_format!r} is unknown; known: auto, dummy")


def _opened(path: Path) -> Any:
    """The open safetensors file; raises WeightsError naming a file that is cut short or none."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise WeightsError(f"{path} cannot be read ({error}): is its download complete?") from None


@torch.no_grad()
def _fill_randomly(model: Model, seed: int) -> None:
    rank, size = model.spec.shard.rank, model.spec.shard.size
    generator = torch.Generator(device=model.device).manual_seed(seed * size + rank)
    experts = {
        getattr(layer, product.name): product.experts
        for layer in model.layers
        for product in layer.spec.products
    }
    done, total = 0, sum(parameter.nbytes for parameter in model.parameters())
    with telling(lambda: f"drew {done / 1e9:.2f} of {total / 1e9:.2f} GB of random weights"):
        for module in model.modules():
            quantised = isinstance(module, Weight) and module.format is not DENSE
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("norm"):
                    parameter.fill_(1.0)
                elif name.endswith(("bias", "sinks")):
                    parameter.zero_()
                elif not quantised:
                    parameter.normal_(0.0, model.spec.initializer_range, generator=generator)
            if isinstance(module, Weight) and quantised:
                for weight in _matrices(module, experts.get(module, 0)):
                    values = torch.empty(weight.shape, dtype=model.dtype, device=model.device)
                    values.normal_(0.0, model.spec.initializer_range, generator=generator)
                    weight.format.fill(weight, values)
            done += sum(parameter.nbytes for parameter in module.parameters(recurse=False))


def _matrices(weight: Weight, experts: int) -> list[Weight]:
    """The experts of a weight, or it alone: quantising all of a layer's at once would take much memory."""
    return [weight.part(index, experts) for index in range(experts)] or [weight]


def destinations(model: Transformer) -> dict[str, Stored]:
    """Checkpoint name -> what it fills (often a part of a fused weight), for all but a tied lm_head."""
    spec = model.spec
    targets = of_product(spec.embedding, Weight("", model.embed_tokens))
    targets |= of_norm(spec.final_norm, model.final_norm, "model.")
    if not spec.tie_word_embeddings:
        targets |= of_product(spec.head, model.lm_head)
    if model.score is not None:
        targets["score.weight"] = Stored.into(model.score)._replace(fills="score")
    return targets | of_layers(model)


def of_layers(model: Model) -> dict[str, Stored]:
    """Those of its layers' products and norms."""
    targets: dict[str, Stored] = {}
    for layer in model.layers:
        prefix = f"{layer.spec.prefix}."
        for norm in layer.spec.norms:
            targets |= of_norm(norm, getattr(layer, norm.name), prefix)
        for product in layer.spec.products:
            weight = getattr(layer, product.name)
            apart = {} if product.stacked else of_product(product, weight, prefix)
            targets |= apart
            if product.stack:  # one rank adds a bias of what is summed over ranks
                biased = not (product.adds and model.spec.shard.in_group.rank)
                shared = tuple(f"{prefix}{source.module}." for source in product.folded_sources)
                names = tuple(name for name in apart if not name.startswith(shared))
                targets |= _of_stack(product, weight, prefix, names, biased)
        if layer.xielu is not None:
            targets |= _of_xielu(layer.xielu, prefix)
        if isinstance(layer, DeltaLayer):
            targets |= _of_delta_net(layer, prefix)
        if isinstance(layer, AttentionLayer) and layer.sinks is not None:
            heads = layer.mixer.own_heads
            whole = layer.mixer.qkv.sources[0].part.whole[0] // layer.mixer.head_dim
            targets[f"{prefix}self_attn.sinks"] = Stored(
                ((whole,),), FLOATS, layer.sinks.copy_, (heads,), fills=f"{prefix}sinks"
            )
    return targets


def _of_xielu(numbers: Tensor, prefix: str) -> dict[str, Stored]:
    """What fills the numbers of an activation (ops.torch_ops.xielu); the last two are the same in all
    checkpoints, and may be missing."""
    numbers[2:] = torch.tensor((0.5, -1e-6))
    return {
        f"{prefix}mlp.act_fn.{name}": Stored(
            ((), (1,)), FLOATS, target.copy_, optional=name in ("beta", "eps"), fills=f"{prefix}xielu"
        )
        for name, target in zip(("alpha_p", "alpha_n", "beta", "eps"), numbers.split(1), strict=True)
    }


def _of_delta_net(layer: DeltaLayer, prefix: str) -> dict[str, Stored]:
    """What fills what a delta net has besides its products."""
    mixer, size = layer.mixer, layer.mixer.shard.size
    channels, heads = sum(mixer.widths) * size, (mixer.value_heads * size,)

    def take(found: Tensor) -> None:
        layer.conv.copy_(torch.cat([found[own, 0] for own in mixer.own_channels]))

    shape = channels, 1, mixer.kernel
    targets = {"conv1d.weight": Stored((shape,), FLOATS, take, fills=f"{prefix}conv")}
    for name, target in {"A_log": layer.a_log, "dt_bias": layer.dt_bias}.items():
        fills = f"{prefix}{name.lower()}"
        targets[name] = Stored((heads,), FLOATS, target.copy_, (mixer.own_heads,), fills=fills)
    return {f"{prefix}linear_attn.{name}": stored for name, stored in targets.items()}


def of_norm(norm: Norm, target: Tensor, prefix: str) -> dict[str, Stored]:
    if not norm.module:
        target.fill_(1.0)
        return {}

    def take(found: Tensor) -> None:
        changed = (norm.scale, norm.offset) != (1, 0)
        target.copy_(found.float() * norm.scale + norm.offset if changed else found)

    stored = Stored(((norm.size,),), FLOATS, take, (norm.own,), fills=f"{prefix}{norm.name}")
    return {f"{prefix}{norm.module}.weight": stored}


def of_product(product: Product, weight: Weight, prefix: str = "") -> dict[str, Stored]:
    """What fills a product's weight. Rows of padding become zeros at once."""
    targets: dict[str, Stored] = {}
    start = 0
    for module, part, order, _ in product.sources:
        own = slice(start, start := start + part.rows.stop - part.rows.start)
        fills = f"{prefix}{product.name}, rows {own.start}:{own.stop}"
        found = weight.format.reads(weight, own, part)
        scaled = next((name for name in SCALES if name in found), "weight")
        if weight.bias is not None:
            found["bias"] = Stored(((part.whole[0],),), FLOATS, weight.bias[own].copy_, (part.rows,))
        for name, stored in found.items():
            if name in (scaled, "bias") and product.scale != 1:
                stored = _changed(stored, lambda value: value.float() * product.scale)
            if product.centred:
                stored = _changed(stored, centred)
            if order:
                stored = _changed(stored, functools.partial(_ordered, order=order))
            stored, key = stored._replace(fills=fills), f"{prefix}{module}.{name}"
            targets[key] = targets[key].and_then(stored) if key in targets else stored
    if product.padding:
        weight.data[start:] = 0
    for module, part, *_ in product.elsewhere:
        for name, stored in weight.format.reads(
            weight, slice(0, part.rows.stop - part.rows.start), part
        ).items():
            targets[f"{prefix}{module}.{name}"] = stored._replace(optional=True, elsewhere=True)
    return targets


def _of_stack(
    product: Product, weight: Weight, prefix: str, apart: tuple[str, ...], biased: bool
) -> dict[str, Stored]:
    """What fills a product's weight from the tensor of its Stack, and from that of biases [E, N], which
    become zeros unless the product is `biased` on this rank. apart: names of the tensors that checkpoints
    without it have."""
    assert product.stack is not None
    name, transposed, turns = product.stack
    count, ((height, width), own, columns) = product.experts, product.sources[0].part
    each, format = len(product.sources) // count, weight.format
    first, last = product.first_expert, product.first_expert + count - product.folded
    experts = product.all_experts, slice(first, last)
    # A rank's rows follow each other where sources take turns; else all are read.
    rows, kept = (slice(own.start * each, own.stop * each), ALL) if turns else (ALL, own)
    by_row, by_column = (height * each, rows), (width, columns)

    def stored(
        dtypes: tuple[str, ...], put: Callable[[Weight, Tensor], None], *dimensions: tuple[int, slice]
    ) -> Stored:
        def take(found: Tensor) -> None:
            for index, matrix in enumerate(found.to(weight.data.device)):
                parts = (
                    matrix.unflatten(0, (-1, each)).transpose(0, 1)
                    if turns
                    else matrix.unflatten(0, (each, -1))
                )
                put(weight.part(index, count), parts[:, kept].flatten(0, 1))

        shape, cuts = zip(experts, *dimensions, strict=True)
        return Stored((shape,), dtypes, take, cuts, bool(apart), f"{prefix}{product.name}", apart)

    def put_bias(expert: Weight, values: Tensor) -> None:
        assert expert.bias is not None
        expert.bias.copy_(values if biased else torch.zeros_like(values))

    if isinstance(format, Mxfp4):
        groups = width // mxfp4.GROUP, slice(columns.start // mxfp4.GROUP, columns.stop // mxfp4.GROUP)
        targets = {
            "_blocks": stored(BYTES, format.take_elements, by_row, groups, (mxfp4.GROUP // 2, ALL)),
            "_scales": stored(BYTES, format.take_scales, by_row, groups),
        }
    elif transposed:
        matrices = stored(FLOATS, format.fill, by_column, by_row)
        targets = {"": _changed(matrices, lambda found: found.transpose(1, 2))}
    else:
        targets = {"": stored(FLOATS, format.fill, by_row, by_column)}
    if product.bias:
        targets["_bias"] = stored(FLOATS, put_bias, by_row)
    return {f"{prefix}{name}{end}": stored for end, stored in targets.items()}


def _changed(stored: Stored, change: Callable[[Tensor], Tensor]) -> Stored:
    return stored._replace(take=lambda value: stored.take(change(value)))


def centred(value: Tensor) -> Tensor:
    """A matrix [N, K] or a bias [N] minus the mean of its rows."""
    return value.float() - value.float().mean(0)


def _ordered(value: Tensor, order: tuple[int, ...]) -> Tensor:
    """The rows of each head in another order; a scale of all rows stays as it is."""
    if not value.dim() or len(value) == 1:
        return value
    bits = value.view(torch.uint8) if value.dtype == E4M3 else value  # not every torch can index e4m3
    return bits.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1).view(value.dtype)


def _kv_scales(model: Model, found: dict[tuple[int, str], float]) -> dict[str, Stored]:
    """The checkpoint names of scales of keys and values -> where they go: found[layer, "k" or "v"]."""

    def stored(key: tuple[int, str]) -> Stored:
        return Stored(((), (1,)), FLOATS, lambda value: found.update({key: positive(value)}))

    return {
        f"{layer.spec.prefix}.self_attn.{name.format(part)}": stored((index, part))
        for index, layer in enumerate(model.layers)
        if isinstance(layer, AttentionLayer)
        for part in "kv"
        for name in KV_SCALE_NAMES
    }


def _files(model_dir: Path) -> list[Path]:
    try:
        files = weight_files(model_dir)
    except ValueError as error:
        raise WeightsError(str(error)) from None
    if files[0].name == SINGLE and (index := model_dir / INDEX).is_file():
        log.warning("%s is read, and %s is not: remove the one that is out of date", files[0], index)
    return files


class _Tensor(NamedTuple):
    """A tensor of a checkpoint, of which `cut` is read (of one without dimensions: all)."""

    path: Path
    name: str
    target: Stored
    cut: tuple[slice, ...]
    nbytes: int  # of what is read
    source: FileRange | None  # where that lies, for an Uploader
    state: tuple[int, int]  # of the file, when its header was read


def _find(model: Model, model_dir: Path, targets: dict[str, Stored]) -> list[_Tensor]:
    """What to read of the checkpoint's files. Only their headers are looked at here, so that what does not
    fit is said before minutes of reading."""
    spec = model.spec
    tied = targets["model.embed_tokens.weight"] if spec.tie_word_embeddings else None
    says = spec.format
    found: dict[str, _Tensor] = {}
    unexpected: list[str] = []
    for path in _files(model_dir):
        with _opened(path) as file:
            header = Header(path)
            for name in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if name.endswith(_COMPUTED_SUFFIX) or name.startswith(spec.ignored):
                    continue
                known = spec.known_name(name)
                target = targets.get(known) or (tied if known == "lm_head.weight" else None)
                if target is None:
                    unexpected.append(name)
                if target is None or target.elsewhere:
                    continue
                if known in found:
                    raise WeightsError(f"{path}: {name} appears in more than one file")
                stored = file.get_slice(name)
                shape = tuple(stored.get_shape())
                if shape not in target.shapes:
                    raise WeightsError(
                        f"{path}: {name} has shape {list(shape)}, config.json asks for "
                        f"{' or '.join(str(list(shape)) for shape in target.shapes)}"
                    )
                dtype = stored.get_dtype()
                if dtype not in target.dtypes:
                    raise WeightsError(
                        f"{path}: {name} is {dtype}; only {', '.join(target.dtypes)} are loaded"
                        f"{'' if says == 'dense' else f' (by its quantization_config: {says})'}"
                    )
                cut = target.cut(shape)
                nbytes, source = _nbytes(shape, cut, dtype), None
                if nbytes > SMALL and (bytes_of := header.find(name, cut)):
                    source = FileRange(path, *bytes_of, stored[:0].dtype)
                found[known] = _Tensor(path, name, target, cut, nbytes, source, header.state)
    if unexpected:
        packed = [name.rpartition(".")[0] for name in unexpected if name.endswith(PACKED)]
        dense = [module for module in packed if f"{spec.known_name(module)}.weight" in targets]
        cure = f". {some(dense)} should have 16 bits, whatever the other products have" if dense else ""
        raise WeightsError(
            f"{model_dir} has tensors that config.json does not account for: {some(unexpected)}{cure}"
        )
    within = {name for tensor in found.values() for name in tensor.target.instead}
    if twice := sorted(within & found.keys()):
        raise WeightsError(f"{model_dir} has {some(twice)} twice: alone, and in a tensor of all experts")
    absent = targets.keys() - found.keys() - within
    missing = sorted(name for name in absent if not targets[name].optional)
    if missing:
        cure = "fetch the checkpoint again, or mend config.json"
        raise WeightsError(f"{model_dir} lacks tensors that config.json asks for: {some(missing)}; {cure}")
    return list(found.values())


def _nbytes(shape: tuple[int, ...], cut: tuple[slice, ...], dtype: str) -> int:
    """Bytes of a part of a tensor, whose type has its bits as the first number of its name, as BF16."""
    bits = re.search(r"\d+", dtype)
    count = int(bits[0]) // 8 if bits else 1
    for part, size in zip(cut, shape, strict=True):
        count *= len(range(*part.indices(size)))
    return count


@torch.no_grad()
def _load_safetensors(model: Model, model_dir: Path, targets: dict[str, Stored]) -> None:
    if (model_dir / ADAPTER_CONFIG).is_file() and model.spec.shard.rank == 0:
        # Such a file is often left in the folder of a merged checkpoint.
        log.warning(
            "%s has %s, but no adapter's weights: serving the weights that are there, as they are",
            *(model_dir, ADAPTER_CONFIG),
        )
    scales: dict[tuple[int, str], float] = {}
    optional = {name: stored._replace(optional=True) for name, stored in _kv_scales(model, scales).items()}
    tensors = _find(model, model_dir, optional | targets)
    tied_head: Tensor | None = None
    done, total, began = 0, sum(tensor.nbytes for tensor in tensors), time.monotonic()

    def how_far() -> str:
        return f"read {done / 1e9:.2f} of {total / 1e9:.2f} GB in {time.monotonic() - began:.0f} s"

    with telling(how_far, lambda: done), _uploader(model.device, tensors) as upload:
        for (path, found), of_file in itertools.groupby(tensors, lambda tensor: (tensor.path, tensor.state)):
            with _opened(path) as mapped:
                _check_unchanged(path, found)
                for tensor in of_file:
                    name, target = tensor.name, tensor.target
                    try:
                        value = _value(mapped, tensor, upload)
                        known = model.spec.known_name(name)
                        if known not in targets and known not in optional:
                            tied_head = value
                        else:
                            target.take(value)
                        del value  # its memory is for the next one
                    except ValueError as error:
                        raise WeightsError(f"{path}: {name} {error}") from None
                    except OSError as error:
                        raise WeightsError(f"{path}: {name} cannot be read: {error}") from None
                    done += tensor.nbytes
            _check_unchanged(path, found)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
    seconds = time.monotonic() - began
    log.info("read %.2f GB in %.2f s, %.1f GB/s", done / 1e9, seconds, done / 1e9 / seconds)
    _finish(model, model_dir)
    _set_kv_scales(model, model_dir, scales)
    if tied_head is None:
        return
    assert isinstance(model, Transformer)
    if not torch.equal(tied_head.to(model.embed_tokens), model.embed_tokens[: len(tied_head)]):
        raise WeightsError(
            f"{model_dir}: config.json says tie_word_embeddings, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false"
        )


def _check_unchanged(path: Path, found: tuple[int, int]) -> None:
    """Tensors of a file that is replaced may lie elsewhere: what is read there would be other numbers."""
    if state(path) != found:
        raise WeightsError(f"{path} was replaced or written to while it was loaded; load it again")


def _uploader(device: torch.device, tensors: list[_Tensor]) -> AbstractContextManager[Uploader | None]:
    """None on a CPU: a tensor of the mapped file is copied where it belongs."""
    if device.type == "cpu":
        return nullcontext()
    return closing(Uploader(device, [tensor.source for tensor in tensors if tensor.source]))


def _value(mapped: Any, tensor: _Tensor, upload: Uploader | None) -> Tensor:
    """What is read of a tensor: on upload's device, or in the mapped file."""
    if upload and tensor.source:
        return upload.next()
    if not tensor.cut:  # get_slice takes no tensor of no dimensions
        return mapped.get_tensor(tensor.name)
    value = mapped.get_slice(tensor.name)[tensor.cut]
    return upload.copy(value) if upload and tensor.nbytes > SMALL else value


def _finish(model: Model, model_dir: Path) -> None:
    """What a weight can do only when it has all of its tensors."""
    for index, layer in enumerate(model.layers):
        for product in layer.spec.products:
            weight: Weight = getattr(layer, product.name)
            if isinstance(weight.format, Int4):
                try:
                    weight.format.finish(weight)
                    if product.experts and weight.order is not None:
                        raise ValueError("puts columns of experts into groups that are not neighbours")
                except ValueError as error:
                    parts = ", ".join(product.modules)
                    raise WeightsError(f"{model_dir}: g_idx of layer {index}'s {parts} {error}") from None


def _set_kv_scales(model: Model, model_dir: Path, found: dict[tuple[int, str], float]) -> None:
    """All layers' scales or none: without any, keys and values are stored as they are."""
    if not found:
        return
    for index, layer in enumerate(model.layers):
        if not isinstance(layer, AttentionLayer):
            continue
        missing = [part for part in "kv" if (index, part) not in found]
        if missing:
            raise WeightsError(
                f"{model_dir} has scales of some keys and values, but not self_attn.{missing[0]}_scale of "
                f"layer {index}"
            )
        layer.kv_scales = (found[index, "k"], found[index, "v"])
