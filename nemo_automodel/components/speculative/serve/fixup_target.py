# SPDX-License-Identifier: Apache-2.0
"""Does the chosen vLLM hand out the hidden states of this kind of target at all?"""

from __future__ import annotations

from nemo_automodel.components.speculative.serve.ledger import Ledger
from nemo_automodel.components.speculative.serve.types import TargetFacts
from nemo_automodel.components.speculative.serve.vllm_release import VllmRelease

# Classes in vLLM 0.32's registry that lack SupportsEagle3 (each imported and asked with `supports_eagle3`).
# A class that is not in the registry runs on vLLM's Transformers backend, which has it. 0.26 and 0.31 were read, too.
WHERE = "serve.vllm.version"
WITHOUT_EAGLE3 = {
    *("AXK1ForCausalLM", "AriaForConditionalGeneration", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
    *("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "Blip2ForConditionalGeneration", "BloomForCausalLM"),
    *("ChatGLMForConditionalGeneration", "ChatGLMModel", "Cohere2ForCausalLM", "CohereForCausalLM"),
    *("DbrxForCausalLM", "DeciLMForCausalLM", "DeepseekVLV2ForCausalLM", "Ernie4_5_MoeForCausalLM"),
    *("Exaone4ForCausalLM", "ExaoneForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    *("FalconForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM", "GLM4VForCausalLM", "GPT2LMHeadModel"),
    *("GPTJForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM"),
    *("Gemma3nForConditionalGeneration", "GemmaForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM"),
    *("GraniteMoeSharedForCausalLM", "HYV3ForCausalLM", "HrmTextForCausalLM", "HyperCLOVAXForCausalLM"),
    *("IQuestLoopCoderForCausalLM", "Idefics3ForConditionalGeneration", "InternLM2ForCausalLM", "JambaForCausalLM"),
    *("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
    *("Mamba2ForCausalLM", "MambaForCausalLM", "MixtralForCausalLM", "MolmoForCausalLM", "Moondream3ForCausalLM"),
    *("MoonshotKimiaForCausalLM", "NemotronForCausalLM", "OPTForCausalLM", "OlmoHybridForCausalLM"),
    *("OlmoeForCausalLM", "OrionForCausalLM", "Ovis2_6ForCausalLM", "Ovis2_6_MoeForCausalLM"),
    *("PaliGemmaForConditionalGeneration", "PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM"),
    *("PanguUltraMoEForCausalLM", "Param2MoEForCausalLM", "Phi3VForCausalLM", "Phi4MMForCausalLM"),
    *("PhiMoEForCausalLM", "Qwen2MoeForCausalLM", "Rnj1ForCausalLM", "SarvamMoEForCausalLM"),
    *("SmolVLMForConditionalGeneration", "SolarForCausalLM", "StableLmForCausalLM", "Step3TextForCausalLM"),
    *("Step3p5ForCausalLM", "UltravoxModel", "VoxtralForConditionalGeneration", "Zamba2ForCausalLM"),
}
_ASKED = (0, 32)  # the release whose classes were asked
# Classes that got it meanwhile: the last release that was read without it, the first one that was read with it.
_GAINED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    **dict.fromkeys(
        ("GPTNeoXForCausalLM", "GraniteForCausalLM", "GraniteSWAForCausalLM", "Jais2ForCausalLM", "PhiForCausalLM")
        + ("MiniCPMV4_6ForConditionalGeneration", "SeedOssForCausalLM"),
        ((0, 31), (0, 32)),
    ),
    **dict.fromkeys(
        ("Cohere2MoeForCausalLM", "FlexOlmoForCausalLM", "MiMoV2OmniForCausalLM", "Olmo3ForCausalLM")
        + ("Plamo3ForCausalLM", "Qwen3OmniMoeForConditionalGeneration", "SarvamMLAForCausalLM"),
        ((0, 26), (0, 31)),
    ),
}


def check_family(ledger: Ledger, target: TargetFacts, release: VllmRelease) -> None:
    """Releases before 0.22 keep a list of target families; later ones ask the target's class (SupportsEagle3).

    Support has only grown, so a class without it in 0.32 has none before; in a newer release it may.
    """
    _check_layer_kinds(ledger, target)
    allowed = release.target_allow_list
    if allowed is not None:
        if not any(part in target.model_type for part in allowed):
            found = f"vLLM {release.version} does not take EAGLE-3 drafts for a {target.model_type} target"
            newer = _class_name(target) not in WITHOUT_EAGLE3
            remedy = "use vLLM >= 0.22" if newer else "0.32 does not, either: this target cannot be served with a draft"
            ledger.problem(found, where=WHERE, remedy=remedy, needs_newer_vllm=newer)
        return
    name = _class_name(target)
    found = f"vLLM's {name} hands out no hidden states (it lacks SupportsEagle3)"
    number = _number(release.version)
    if name in _GAINED:
        _check_gained(ledger, release.version, number, found, *_GAINED[name])
    elif name in WITHOUT_EAGLE3 and number > _ASKED:
        ledger.warn(f"{found} in 0.32; whether it does in {release.version} is not known", where="serve.target")
    elif name in WITHOUT_EAGLE3:
        ledger.problem(found, where="serve.target", remedy="serve this target without a draft, or try a newer vLLM")


def _check_layer_kinds(ledger: Ledger, target: TargetFacts) -> None:
    """vLLM's Qwen2 and Qwen3 refuse layers of two kinds, unless max_window_layers is the layer count (0.32, run)."""
    if _class_name(target) not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        return
    full, count = target.config.get("max_window_layers", 28), target.num_hidden_layers
    types = target.config.get("layer_types")
    slides = bool(target.config.get("use_sliding_window") and target.config.get("sliding_window"))
    derived = slides and type(full) is int and 0 < full < count
    mixed = len(set(map(str, types))) > 1 if isinstance(types, list) else derived
    if mixed and full != count:
        found = f"the target mixes full and sliding layers with max_window_layers={full} of {count}: vLLM refuses it"
        ledger.problem(found, where="serve.target", remedy="vLLM cannot serve this target, with or without a draft")


def _check_gained(
    ledger: Ledger,
    version: str,
    release: tuple[int, int],
    found: str,
    without: tuple[int, int],
    having: tuple[int, int],
) -> None:
    """A class that has it from `having` on and had none up to `without`; in between nobody looked."""
    first = f"{having[0]}.{having[1]}"
    if release <= without:
        ledger.problem(f"{found} in {version}", where=WHERE, remedy=f"use vLLM >= {first}", needs_newer_vllm=True)
    elif release < having:
        ledger.warn(f"{found} in 0.{without[1]}; whether it does in {version} is not known", where=WHERE)


def check_multimodal(ledger: Ledger, parallel: bool, target: TargetFacts | None, release: VllmRelease) -> None:
    """0.16-0.20 refuse to draft in parallel for a multimodal target; later ones draft from its text (report 2.9)."""
    if not parallel or target is None or not {"vision_config", "audio_config"} & set(target.config):
        return
    if release.parallel_drafting and _number(release.version) < (0, 21):
        found = f"vLLM {release.version} cannot serve P-EAGLE for a multimodal target"
        ledger.problem(found, where=WHERE, remedy="use vLLM >= 0.21", needs_newer_vllm=True)


def _number(version: str) -> tuple[int, int]:
    major, minor = (int(part) for part in version.split("."))
    return major, minor


def _class_name(target: TargetFacts) -> str | None:
    names = target.config.get("architectures")
    return names[0] if isinstance(names, (list, tuple)) and names and isinstance(names[0], str) else None
