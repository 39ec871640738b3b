"""Every class of transformers behind an Auto class that trains with labels, tiny, as a problem of
the oracle."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.tiny_batches import LABELS, batch_of, loss_of
from benchmarks.tiny_configs import tiny_config
from tests.support.oracle import Problem

TASKS = """
CAUSAL_LM MASKED_LM SEQ_TO_SEQ_CAUSAL_LM SEQUENCE_CLASSIFICATION IMAGE_CLASSIFICATION
SPEECH_SEQ_2_SEQ CTC IMAGE_TEXT_TO_TEXT MULTIMODAL_LM
"""
DETERMINISTIC = "batched_mm"
# One class of each of forty architectures, cheap ones where architectures are alike. The suite takes
# every fourteenth one.
_CHOSEN = """
LlavaForConditionalGeneration GPT2LMHeadModel GPTNeoXForCausalLM OPTForCausalLM BloomForCausalLM
FalconForCausalLM PhiForCausalLM Gemma2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
WhisperForConditionalGeneration DeepseekV3ForCausalLM GptOssForCausalLM Cohere2ForCausalLM
StableLmForCausalLM MambaForCausalLM Lfm2ForCausalLM CTRLLMHeadModel XLNetLMHeadModel
DiffLlamaForCausalLM BertForMaskedLM AlbertForMaskedLM ElectraForMaskedLM DebertaForMaskedLM
MPNetForMaskedLM ModernBertForMaskedLM FNetForMaskedLM DistilBertForMaskedLM
T5ForConditionalGeneration BartForConditionalGeneration MarianMTModel ViTForImageClassification
SwinForImageClassification BeitForImageClassification ConvNextForImageClassification
ResNetForImageClassification CLIPForImageClassification MixtralForCausalLM JambaForCausalLM
LlamaForCausalLM
"""
SAMPLE = tuple(_CHOSEN.split())


@dataclass(frozen=True)
class Entry:
    """A class, the Auto class it was found behind, its architecture, and how its experts, if any,
    are computed."""

    task: str
    name: str
    architecture: str
    experts: str = DETERMINISTIC


def entries() -> list[Entry]:
    """One class of every architecture first, of all Auto classes in turn: the first rows of a table
    stand for all."""
    from transformers.models.auto import configuration_auto, modeling_auto

    result: dict[str, Entry] = {}
    places: dict[str, int] = {}
    first: dict[str, str] = {}
    for task in TASKS.split():
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items()
        pairs = [
            (a, n) for a, names in mapping for n in ([names] if isinstance(names, str) else names)
        ]
        for place, (architecture, name) in enumerate(pairs):
            result.setdefault(name, Entry(task, name, architecture))
            places.setdefault(name, place)
    for entry in result.values():
        folder = configuration_auto.model_type_to_module_name(entry.architecture)
        first.setdefault(folder, entry.name)
    standing = set(first.values())
    return sorted(
        result.values(), key=lambda entry: (entry.name not in standing, places[entry.name])
    )


def entry_of(name: str) -> Entry:
    """The class of this name."""
    (entry,) = (entry for entry in entries() if entry.name == name)
    return entry


def problem_of(entry: Entry) -> Problem:
    """`entry` as a problem; raises whatever transformers raises for a model that cannot be
    made so."""
    make, problem = partial(_make, entry), Problem(partial(_make, entry), None, lambda size: None)  # type: ignore[arg-type,return-value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = problem.model()
    return Problem(make, loss_of(model), batch_of(model, entry.task))


def _make(entry: Entry) -> nn.Module:
    import transformers

    kind = getattr(transformers, entry.name)
    config = tiny_config(kind.config_class, num_labels=LABELS)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id = 0
    model = kind(config)
    if entry.experts and has_experts(model):
        model.set_experts_implementation(entry.experts)
    return model  # type: ignore[no-any-return]


def has_experts(model: Any) -> bool:
    from transformers import PreTrainedModel

    return any(
        isinstance(m, PreTrainedModel) and m._can_set_experts_implementation()
        for m in model.modules()
    )
