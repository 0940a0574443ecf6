"""CLIP: what a node gets on a CLIP socket: a tokenizer, a text encoder and the patcher around
it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from comfy.devices import placement, precision, residency
from comfy.ops.encoded import state_dict_for_file
from comfy.patching.patcher import ModelPatcher
from comfy.text_encoders import weighting, writing
from comfy.text_encoders.generation import Choice
from comfy.text_encoders.scheduling import encode_scheduled
from comfy.weights.fill import fill

logger = logging.getLogger(__name__)

StateDict = Mapping[str, Tensor]

# What files of plain encoders leave out: a projection (then the identity) and a scale of no use
# here.
DEFAULT_WEIGHTS = {
    "text_projection.weight": lambda empty: torch.eye(*empty.shape, dtype=empty.dtype),
    "logit_scale": lambda empty: torch.full_like(empty, 4.6055),
}


class EncoderTarget(Protocol):
    """Which classes a model family's text encoding is made of, and arguments for the encoder."""

    tokenizer: Any
    clip: Any
    params: dict[str, Any]


class CLIP:
    """A text encoder with its tokenizer.

    Attributes:
        cond_stage_model: The encoder module, shared among clones.
        tokenizer: Its tokenizer, shared among clones.
        patcher: This view of the encoder; takes LoRAs and other patches.
        layer_idx: Layer whose state is used, negative from the end; None for the encoder's own.
        tokenizer_options: Options for every call of the tokenizer.
        use_clip_schedule: Whether hooks change the encoder along the sampling schedule.
        weight_interpretation: What weights on tokens do; a name of `weighting.INTERPRETATIONS`.
        apply_hooks_to_conds: Hooks to attach to conditioning made here.
    """

    def __init__(
        self,
        target: EncoderTarget | None = None,
        embedding_directory: str | Iterable[str] | None = None,
        no_init: bool = False,
        tokenizer_data: Mapping[str, Any] | None = None,
        parameters: int = 0,
        state_dict: StateDict | Sequence[StateDict] = (),
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the encoder and fill it.

        Args:
            target: Classes and arguments; needed unless ``no_init``.
            embedding_directory: Folder or folders of textual inversions.
            no_init: Leave everything to the caller (clones).
            tokenizer_data: State dict entries a tokenizer may need.
            parameters: Number of weights, for the choice of device.
            state_dict: The whole encoder's weights, or a list of those of its parts.
            model_options: ``load_device``, ``offload_device``, ``dtype``, configuration overrides.
        """
        if no_init:
            return
        if target is None:
            raise ValueError("CLIP needs a target: the classes of the tokenizer and the encoder")
        options = dict(model_options or {})
        load_device = options.get("load_device", placement.text_encoder_device())
        offload_device = options.get("offload_device", placement.text_encoder_offload_device())
        dtype = options.get("dtype") or precision.text_encoder_dtype(load_device)
        initial = options.get("initial_device") or placement.text_encoder_initial_device(
            load_device, offload_device, parameters * dtype.itemsize
        )
        params = {**target.params, "dtype": dtype, "model_options": options}
        params["device"] = "meta" if state_dict else initial
        self.cond_stage_model: Any = target.clip(**params)  # an nn.Module, see EncoderTarget
        self.tokenizer: Any = target.tokenizer(
            embedding_directory=embedding_directory, tokenizer_data=tokenizer_data or {}
        )
        self._fill(state_dict)
        self.cond_stage_model.to(initial)
        self.patcher = ModelPatcher(self.cond_stage_model, load_device, offload_device)
        self.patcher.is_clip = True
        self.apply_hooks_to_conds: Any = None
        self.layer_idx: int | None = None
        self.use_clip_schedule = False
        self.tokenizer_options: dict[str, Any] = {}
        self.weight_interpretation = weighting.DEFAULT
        logger.debug("Text encoder %s in %s", type(self.cond_stage_model).__name__, dtype)

    def _fill(self, state_dict: StateDict | Sequence[StateDict]) -> None:
        """Weights of the whole encoder at once, or of its parts one by one."""
        if not state_dict:
            return
        if isinstance(state_dict, Mapping):
            name = f"text encoder ({type(self.cond_stage_model).__name__})"
            fill(self.cond_stage_model, dict(state_dict), name, DEFAULT_WEIGHTS)
            return
        for part in state_dict:
            self.load_sd(part)

    def clone(self) -> CLIP:
        """A view with its own patches and options, on the same weights."""
        new = type(self)(no_init=True)
        new.patcher = self.patcher.clone()
        new.cond_stage_model = self.cond_stage_model
        new.tokenizer = self.tokenizer
        new.layer_idx = self.layer_idx
        new.tokenizer_options = dict(self.tokenizer_options)
        new.use_clip_schedule = self.use_clip_schedule
        new.weight_interpretation = self.weight_interpretation
        new.apply_hooks_to_conds = self.apply_hooks_to_conds
        return new

    def add_patches(
        self, patches: Mapping[Any, Any], strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> Any:
        """Add weight patches to this view; returns the keys taken."""
        return self.patcher.add_patches(patches, strength_patch, strength_model)

    def get_key_patches(self) -> dict[str, Any]:
        """Weights and their patches by key."""
        return self.patcher.get_key_patches()

    def set_tokenizer_option(self, option_name: str, value: Any) -> None:
        """An option for every later call of the tokenizer, such as ``t5xxl_min_length``."""
        self.tokenizer_options[option_name] = value

    def clip_layer(self, layer_idx: int) -> None:
        """Use the state of another layer; -1 is the last, -2 the one before."""
        self.layer_idx = layer_idx

    def tokenize(self, text: str, return_word_ids: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Chunks of ``(token, weight)`` by encoder name (``"l"``, ``"g"``, ``"t5xxl"``, ...).

        With one of ``skip_template``, ``thinking`` and ``system_prompt`` they are tokens for
        `generate`: the text in its language model's conversation (see `writing.asked_tokens`).
        """
        if not writing.ASKS.isdisjoint(kwargs):
            return writing.asked_tokens(self.tokenizer, text, **kwargs)
        options = {**self.tokenizer_options, **(kwargs.get("tokenizer_options") or {})}
        if options:
            kwargs["tokenizer_options"] = options
        return self.tokenizer.tokenize_with_weights(text, return_word_ids, **kwargs)

    def encode_from_tokens(
        self,
        tokens: Mapping[str, Any],
        return_pooled: bool | str = False,
        return_dict: bool = False,
    ) -> Any:
        """Conditioning ``[1, L, D]`` of tokens.

        Args:
            tokens: As `tokenize` gives them.
            return_pooled: Give (conditioning, pooled state); "unprojected": the pooled state before
                its projection.
            return_dict: Give a dict with ``cond``, ``pooled_output`` and whatever else the encoder
                tells.
        """
        self._prepare(return_pooled == "unprojected")
        self.load_model(tokens)
        self.cond_stage_model.set_clip_options({"execution_device": self.patcher.load_device})
        encode = partial(self.cond_stage_model.encode_token_weights, tokens)
        cond, pooled, *extras = residency.run_or_make_room(self.patcher, encode)
        if return_dict:
            told: dict[str, Any] = {"cond": cond, "pooled_output": pooled}
            told.update(extras[0] if extras else {})
            self.add_hooks_to_dict(told)
            return told
        return (cond, pooled) if return_pooled else cond

    def _prepare(self, unprojected: bool = False) -> None:
        """Set the encoder's options to those of this view."""
        self.cond_stage_model.reset_clip_options()
        self.cond_stage_model.set_clip_options(
            {"weight_interpretation": self.weight_interpretation}
        )
        if self.layer_idx is not None:
            self.cond_stage_model.set_clip_options({"layer": self.layer_idx})
        if unprojected:
            self.cond_stage_model.set_clip_options({"projected_pooled": False})

    def encode_from_tokens_scheduled(
        self,
        tokens: Mapping[str, Any],
        unprojected: bool = False,
        add_dict: Mapping[str, Any] | None = None,
        show_pbar: bool = True,
    ) -> list[list[Any]]:
        """CONDITIONING ``[[cond, options], ...]``: one entry, or one per step of the hooks'
        schedule.

        Args:
            add_dict: More entries for the options.
            show_pbar: Report progress when there are several entries.
        """
        return encode_scheduled(self, tokens, unprojected, add_dict or {}, show_pbar)

    def add_hooks_to_dict(self, pooled_dict: dict[str, Any]) -> dict[str, Any]:
        """Attach this view's hooks to the options of a conditioning."""
        if self.apply_hooks_to_conds is not None:
            pooled_dict["hooks"] = self.apply_hooks_to_conds
        return pooled_dict

    def encode(self, text: str) -> Tensor:
        """Conditioning of a text."""
        return self.encode_from_tokens(self.tokenize(text))

    def generate(
        self,
        tokens: Mapping[str, Any],
        do_sample: bool = True,
        max_length: int = 256,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 0.95,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        presence_penalty: float = 0.0,
    ) -> list[int]:
        """Ids of the words that a language model writes behind some tokens; see `Choice`.

        Args:
            tokens: As `tokenize` gives them.
            max_length: How many words at most.

        Raises:
            ValueError: The encoder cannot write.
        """
        choice = Choice(
            do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, seed
        )
        return writing.written(self, tokens, choice, max_length)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids that `generate` gives.

        Args:
            skip_special_tokens: Whether marks, such as a text's end, are left out.
        """
        return writing.words(self.tokenizer, token_ids, skip_special_tokens)

    def load_sd(self, sd: StateDict, full_model: bool = False) -> Any:
        """Load weights of one encoder, or of all with ``full_model``; returns what did not fit."""
        if full_model:
            return self.cond_stage_model.load_state_dict(sd, strict=False)
        return self.cond_stage_model.load_sd(sd)

    def get_sd(self) -> dict[str, Tensor]:
        """All weights as patched, and what the tokenizer saves."""
        weights = state_dict_for_file(self.cond_stage_model)
        saved = dict(self.tokenizer.state_dict())
        saved.update(weights)
        return saved

    def load_model(self, tokens: Mapping[str, Any] | None = None) -> ModelPatcher:
        """Have the encoder, as this view patches it, ready to run; returns the patcher."""
        required = 0.0
        estimate = getattr(self.cond_stage_model, "memory_estimation_function", None)
        if estimate is not None and tokens:
            required = estimate(tokens, device=self.patcher.load_device)
        residency.load_models_gpu([self.patcher], memory_required=required)
        return self.patcher
