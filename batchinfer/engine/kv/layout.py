"""Shape and size of a model's KV, from its config, for the plan, the pool and the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from batchinfer.engine.kv.kv_shapes import KVShape, has_latent, kv_owners, kv_shapes
from batchinfer.engine.kv.layer_groups import (
    LayerGroup,
    layer_chunks,
    layer_groups,
    most_slots,
    prompt_windows,
)
from batchinfer.engine.kv.model_config import Config, text_config
from batchinfer.engine.kv.recurrent_families import layers_without_kv
from batchinfer.engine.kv.state_layout import (
    StateLayout,
    layer_state_bytes,
    min_slot_bytes,
    state_layout,
)
from batchinfer.engine.kv.unsupported_models import refuse_unsupported

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# Keys under which the configs of different families give each number, in order of preference.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class KVLayout:
    """Shape and size of a model's KV.

    A pool slot holds one block of every layer in a layer group, laid out as
    ``[layer, key or value, kv_head, token, width]``. Widths may differ between keys and
    values, and between layers. A group with fewer layers leaves part of its slots unused. If no
    layer attends, slots hold recurrent state only.
    """

    num_layers: int
    num_kv_heads: int
    """KV heads of a layer. The number of heads and the two widths apply if ``shapes`` is empty."""
    key_width: int
    value_width: int
    block_size: int
    element_bytes: int
    """Bytes per element of the model's dtype, which is also the dtype of KV unless ``fp8``."""
    fp8: bool = False
    """True if keys and values are stored as float8 e4m3fn, one byte per element."""
    groups: tuple[LayerGroup, ...] = ()
    """Layer groups; empty: all layers form one full-attention group."""
    shapes: tuple[KVShape, ...] = ()
    """KV shape of each layer; empty: all layers have the same shape."""
    owners: tuple[int, ...] = ()
    """The layer that stores each layer's KV; empty: each layer stores its own KV."""
    latent: bool = False
    """True if the pool stores latents and the rotary part of keys, once for all heads (MLA)."""
    min_slot_bytes: int = 0
    """Minimum size of a pool slot. Slots with fewer bytes of KV are padded to this size."""
    without_kv: tuple[int, ...] = ()
    """Layers that do not attend."""
    state: StateLayout | None = None
    """Layout of a sequence's recurrent state; None if the model has no recurrent layers."""
    chunks: tuple[int, ...] = ()
    """Size of the chunks within which each layer attends (0: no chunks); empty: all 0."""
    prompt_windows: tuple[int, ...] = ()
    """For each layer, the number of tokens that a token sees in addition to the prompt; 0: all
    tokens. Empty: 0 for all layers."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        block_size: int,
        dtype: str,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        latent: bool = False,
    ) -> KVLayout:
        """Read the layout from a model's config (``config.to_dict()`` or config.json).

        Args:
            config: the model's config, including the family's defaults, which are needed to group
                layers by window.
            kv_cache_dtype: ``auto`` (the model's dtype), or ``fp8`` or its synonym ``fp8_e4m3``.
            max_model_len: maximum number of tokens of a sequence; None: ignore windows.
            latent: true to cache latents (MLA), if the family supports it, instead of expanded
                keys and values.

        Raises:
            ValueError: the family's KV cannot be laid out in blocks.
        """
        text = text_config(config)
        refuse_unsupported(config)
        num_layers, without_kv = _num_layers(text), layers_without_kv(text)
        attends = len(without_kv) < num_layers
        latent = latent and attends and has_latent(text)
        common = _common_shape(text, latent=latent) if attends else KVShape(0, 0, 0)
        layout = cls(
            num_layers=num_layers,
            num_kv_heads=common.num_kv_heads,
            key_width=common.key_width,
            value_width=common.value_width,
            block_size=block_size,
            element_bytes=DTYPE_BYTES[dtype],
            fp8=kv_cache_dtype != "auto",
            shapes=kv_shapes(text, num_layers, common),
            owners=kv_owners(text, num_layers),
            latent=latent,
            min_slot_bytes=min_slot_bytes(text) if attends else layer_state_bytes(text),
            without_kv=without_kv,
            chunks=_chunks(text, num_layers, block_size, max_model_len),
            prompt_windows=prompt_windows(text, num_layers),
        )
        if max_model_len is not None:
            groups = layer_groups(text, layout.stored_elements, max_model_len)
            layout = replace(layout, groups=groups)
        return replace(layout, state=state_layout(text, layout.bytes_per_block))

    @property
    def attention_layers(self) -> list[int]:
        return [layer for layer in range(self.num_layers) if layer not in self.without_kv]

    @property
    def slots_per_state(self) -> int:
        return self.state.num_slots if self.state else 0

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each layer group; 0 = full attention, which comes first. Empty: no layer
        attends."""
        return tuple(group.window for group in self.groups) or (0,) * bool(self.attention_layers)

    @property
    def tokens_per_block(self) -> int:
        """Tokens whose KV a pool slot holds; 0 if slots hold recurrent state only."""
        return self.block_size if self.windows else 0

    @property
    def is_uniform(self) -> bool:
        """True if all layers have the same KV shape. A slot then consists of equal parts."""
        return not self.shapes

    def shape(self, layer: int) -> KVShape:
        """Return the shape of the KV that a layer attends to."""
        if self.is_uniform:
            return KVShape(self.num_kv_heads, self.key_width, self.value_width, self.latent)
        return self.shapes[self.owner(layer)]

    def prompt_window(self, layer: int) -> int:
        return self.prompt_windows[layer] if self.prompt_windows else 0

    def owner(self, layer: int) -> int:
        return self.owners[layer] if self.owners else layer

    @property
    def stored_elements(self) -> list[int]:
        """Elements per token that each layer stores; 0 if it uses another layer's KV."""
        own = [
            self.owner(layer) == layer and layer not in self.without_kv
            for layer in range(self.num_layers)
        ]
        return [self.shape(layer).elements * own[layer] for layer in range(self.num_layers)]

    @property
    def layers_per_slot(self) -> int:
        """Number of layers in the largest group."""
        return max(map(len, self._members))

    def place(self, layer: int) -> tuple[int, int]:
        """Return a layer's group, and the offset of its KV in a slot, in elements."""
        owner, stored = self.owner(layer), self.stored_elements
        for at, members in enumerate(self._members):
            if owner in members:
                before = members[: members.index(owner)]
                return at, self.block_size * sum(stored[other] for other in before)
        raise ValueError(f"layer {layer} is in no layer group")

    @property
    def _members(self) -> list[tuple[int, ...]]:
        """The layers in each group that store KV."""
        if self.groups:
            return [group.layers for group in self.groups]
        return [tuple(at for at, size in enumerate(self.stored_elements) if size)]

    @property
    def elements_per_token(self) -> int:
        """Elements per token in all layers, keys and values together."""
        return sum(self.stored_elements)

    @property
    def elements_per_block(self) -> int:
        """Elements of one pool slot."""
        stored = self.stored_elements
        kv = self.block_size * max(sum(stored[at] for at in group) for group in self._members)
        if not self.min_slot_bytes:
            return kv
        # A slot must hold a whole number of float32 elements of state, and divide into equal parts.
        unit = 4 * self.parts_per_slot
        least = -(-self.min_slot_bytes // (1 if self.fp8 else self.element_bytes))
        return -(-max(kv, least) // unit) * unit

    @property
    def parts_per_slot(self) -> int:
        """Number of equal parts of a slot: its layers, or 1 if layers differ in KV shape or none
        attends."""
        return max(self.layers_per_slot, 1) if self.is_uniform else 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token in all layers."""
        return self.elements_per_token * (1 if self.fp8 else self.element_bytes)

    @property
    def bytes_per_block(self) -> int:
        return self.elements_per_block * (1 if self.fp8 else self.element_bytes)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for ``num_tokens`` tokens of one sequence; 0 if no layer
        attends."""
        return -(-num_tokens // self.block_size) if self.windows else 0

    def slots_for(self, num_tokens: int, num_new: int = 1) -> int:
        """Return the maximum number of pool slots that a sequence holds, including its recurrent
        state, until it has ``num_tokens`` tokens. A step computes up to ``num_new`` tokens."""
        blocks = most_slots(self.windows, self.block_size, num_tokens, num_new)
        return blocks + self.slots_per_state


def _chunks(
    text: Config, num_layers: int, block_size: int, max_model_len: int | None
) -> tuple[int, ...]:
    """Return ``KVLayout.chunks``; empty if no sequence is longer than a chunk."""
    chunks = layer_chunks(text, num_layers)
    chunk = max(chunks, default=0)
    if not chunk or (max_model_len is not None and chunk >= max_model_len):
        return ()
    if chunk % block_size:
        raise ValueError(
            f"some of the model's layers attend within chunks of {chunk} tokens "
            f"(attention_chunk_size), which is not a multiple of the block size {block_size}; "
            f"choose another engine.block_size, or set model.max_model_len: {chunk}"
        )
    return tuple(chunks)


def _common_shape(text: Config, *, latent: bool) -> KVShape:
    """Return the KV shape of layers without an entry of their own in the config."""
    num_heads = _number(text, _NUM_HEADS)
    if latent:
        rank = _number(text, ("kv_lora_rank",))
        return KVShape(1, rank + _number(text, ("qk_rope_head_dim",)), rank, values_in_keys=True)
    if "kv_lora_rank" in text:
        key_width = _number(text, ("qk_nope_head_dim",)) + _number(text, ("qk_rope_head_dim",))
        return KVShape(num_heads, key_width, _number(text, ("v_head_dim",)))
    head_width = text.get("head_dim") or text.get("attention_head_dim")
    key_width = head_width or _number(text, _HIDDEN_SIZE) // num_heads
    return KVShape(_num_kv_heads(text, num_heads), key_width, text.get("v_head_dim") or key_width)


def _num_kv_heads(config: Config, num_heads: int) -> int:
    """Return the number of KV heads: by default one per attention head, or 1 for multi-query."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    for key in _NUM_KV_HEADS:
        if config.get(key) is not None:
            return int(config[key])
    return num_heads


def _num_layers(config: Config) -> int:
    """Return the number of layers; for nemotron_h, the length of the list of layer types."""
    kinds = config.get("layers_block_type")
    return len(kinds) if kinds else _number(config, _NUM_LAYERS)


def _number(config: Config, names: tuple[str, ...]) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int):
            return value
    raise ValueError(f"the model's config has none of the keys {', '.join(names)}")
