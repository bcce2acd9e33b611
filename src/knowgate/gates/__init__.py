"""The registry of gates: loads a gate by its name, such as 'logprob:mean', or from a folder.

A gate decides for each question whether to retrieve. To add one, write a file in this package and an entry in `GATES`.
Other packages add gates with an entry point in the group 'knowgate.gates'. Importing this module loads no gate.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from knowgate.core.registry import RegistryEntry, find_plugins, load_entry, parse_options, split_spec
from knowgate.errors import BadSetting
from knowgate.gates.artifacts import gate_folder
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.types import Gate, Model, Signal

if TYPE_CHECKING:
    from knowgate.gates.fitted_gate import FittedGate

DEFAULT_GATE = "default"  # the packaged gate that was fitted on the current LLM, or else one of the next two
FALLBACK_GATE = "logprob:first"
# For LLMs that return only text. No untrained gate tells well enough what such an LLM knows without further LLM calls:
# see `python -m benchmarks.any_llm_judge`.
TEXT_ONLY_GATE = "always:rules"
PACKAGED_GATES = Path(__file__).parent / "packaged"
GATES = {
    "always": RegistryEntry("knowgate.gates.baselines:AlwaysGate", "always", cost="nothing"),
    "never": RegistryEntry("knowgate.gates.baselines:NeverGate", "never", cost="nothing"),
    "random": RegistryEntry("knowgate.gates.baselines:RandomGate",
        "for a random share of the questions: the baseline", cost="nothing"),
    "prompt": RegistryEntry("knowgate.gates.prompt:PromptGate",
        "the LLM says that it cannot answer",
        needs="labels", cost="one prefill of 120 tokens", paper="Kadavath et al. 2022; DH-ICL 2.1"),
    "logprob": RegistryEntry("knowgate.gates.logprob:LogprobGate",
        "the tokens of the draft are improbable: first, mean, min, entropy or margin",
        needs="logprobs", cost="none when skipping", paper="AdaRAGUE 2025"),
    "flare": RegistryEntry("knowgate.gates.logprob:FlareGate",
        "the least probable token of the draft is below theta",
        needs="logprobs", cost="none when skipping", paper="Jiang et al. 2023"),
    "dhicl": RegistryEntry("knowgate.gates.dhicl:DhiclGate",
        "the LLM, shown similar logged questions and whether it knew them, expects not to know",
        needs="labels", cost="one prefill of 600 tokens", extra="local", paper="Lv et al. 2025 (DH-ICL)"),
    "skr": RegistryEntry("knowgate.gates.skr:SkrGate",
        "retrieval helped the nearest logged questions more often than it hurt",
        cost="one embedding, one search", extra="local", paper="Wang et al. 2023 (SKR)"),
    "seakr": RegistryEntry("knowgate.gates.seakr:SeakrGate",
        "20 sampled answers end in hidden states that are far apart",
        needs="hidden, samples", cost="20 sampled answers", paper="Yao et al. 2025 (SeaKR)"),
    "consistency": RegistryEntry("knowgate.gates.consistency:ConsistencyGate",
        "three sampled answers disagree; works with LLMs that return only text",
        needs="samples", cost="three LLM calls", extra="local", paper="uqlm 2025; LM-Polygraph 2023"),
    "tool": RegistryEntry("knowgate.gates.prompt:ToolGate",
        "the LLM calls a search tool that it is offered, as in agent frameworks",
        needs="tools", cost="one prefill of 200 tokens; on a server one LLM call", paper="Schick et al. 2023 (Toolformer)"),
    "selfrag": RegistryEntry("knowgate.gates.prompt:SelfragGate",
        "the token [Retrieval] is more probable than [No Retrieval]; for LLMs trained with them",
        needs="labels", cost="one prefill of the question", paper="Asai et al. 2024 (Self-RAG)"),
}  # fmt: skip

# Gates that must be fitted first. `fit` names the training function.
FITTED_GATES = {
    "probe": RegistryEntry("knowgate.gates.hidden_state:ProbeGate",
        "a small network classifies a middle-layer hidden state as not knowing",
        needs="hidden", cost="none when skipping", extra="train", paper="CBDR 2025", fit="knowgate.training.probe:fit_probe"),
    "uar": RegistryEntry("knowgate.gates.hidden_state:UarGate",
        "the user asks for sources, or the answer changes with time or is unknown to the LLM",
        needs="hidden", cost="none when skipping", extra="train", paper="Cheng et al. 2024 (UAR)",
        fit="knowgate.training.uar:fit_uar"),
    "adaptive": RegistryEntry("knowgate.gates.adaptive:AdaptiveGate",
        "the question resembles questions that needed one or more rounds of retrieval",
        cost="one embedding", extra="train", paper="Jeong et al. 2024 (Adaptive-RAG)",
        fit="knowgate.training.adaptive:fit_adaptive"),
    "question": RegistryEntry("knowgate.gates.question:QuestionGate",
        "the type, length and words of the question suggest that the LLM does not know the answer",
        cost="no LLM call, 0.05 ms", extra="train", paper="Marina et al. 2025", fit="knowgate.training.question:fit_question"),
    "ik": RegistryEntry("knowgate.gates.answer_judge:IkGate",
        "a fine-tuned judge (or a linear classifier) reads question and draft and says No",
        needs="draft", cost="one prefill of the judge of 100 tokens", extra="train", paper="IK 2025",
        fit="knowgate.training.judges.ik:fit_ik"),
    "judge": RegistryEntry("knowgate.gates.answer_judge:JudgeGate",
        "a small fine-tuned judge finds the LLM's answer wrong; works with LLMs that return only text",
        needs="draft", cost="one prefill of the judge of 70 tokens", extra="train", paper="ours",
        fit="knowgate.training.judges.answer_judge:fit_answer_judge"),
    "gain": RegistryEntry("knowgate.gates.answer_judge:GainGate",
        "the same judge expects an answer from documents to be right and the LLM's own to be wrong",
        needs="draft", cost="two prefills of the judge of 70 tokens", extra="train", paper="ours",
        fit="knowgate.training.judges.gain:fit_gain"),
    "kbm": RegistryEntry("knowgate.gates.kbm:KbmGate",
        "a fine-tuned judge of the question predicts low mastery or certainty; can also filter passages",
        cost="one or two prefills of the judge of 90 tokens", extra="train", paper="Zhang et al. 2024 (KBM)",
        fit="knowgate.training.judges.kbm:fit_kbm"),
    "fusion": RegistryEntry("knowgate.gates.fusion:FusionGate",
        "a logistic regression over all signals of the pass expects retrieval to help",
        needs="as fitted", cost="as fitted", extra="train", paper="ours", fit="knowgate.training.fusion:fit_fusion"),
    "stack": RegistryEntry("knowgate.gates.fusion:StackGate",
        "a fusion that also reads the scores of small fine-tuned judges expects retrieval to help",
        needs="as fitted", cost="as fitted, and one prefill of 70 tokens for each judge", extra="train", paper="ours",
        fit="knowgate.training.stack:fit_stack"),
    "constant": RegistryEntry("knowgate.gates.baselines:ConstantGate",
        "always or never, as its policy says; written by `knowgate fit` without a gate name",
        cost="nothing", extra="train", paper="ours"),
}  # fmt: skip


def load_gate(spec: str, *, plug_in: bool = False) -> Gate:
    """Load a gate by its spec, a text that names the gate and its options.

    Args:
        spec: A name with options ('logprob:mean', 'random:rate=0.3,seed=1') or the folder of a fitted gate.
            'FOLDER,verdict=own' decides by the raw score of the classifier instead of the calibrated need for
            retrieval.
        plug_in: Allow a fitted gate to be used with a different LLM than the one it was fitted on.

    Raises:
        UnknownName: No gate has this name.
        BadSetting: The gate must be fitted first, or an option is wrong.
        ArtifactError: The folder is damaged or is not a fitted gate.

    Example:
        >>> load_gate("logprob:mean").needs
        frozenset({<Signal.LOGPROBS: 'logprobs'>})
    """
    if (fitted := gate_folder.parse_fitted_spec(spec)) is not None:
        return load_fitted_gate(fitted.folder, plug_in=plug_in, verdict=fitted.verdict)
    name, options = split_spec(spec)
    if name in FITTED_GATES:
        raise BadSetting(
            f"gate '{name}' must be fitted before you can use it. Run `knowgate fit {name}` and pass the folder that "
            "it writes."
        )
    check_gate_spec(spec)
    loaded = load_entry(GATES, "gate", name, "knowgate.gates", also=gate_folder.FITTED_FOLDER_HINT)
    gate_class = _check_class(name, loaded)
    return gate_class(**parse_options(gate_class, options, f"gate '{name}'"))


def check_gate_spec(spec: str) -> None:
    """Raise ArtifactError if a gate spec is a folder without a fitted gate.

    Other specs are texts such as 'logprob:mean'.
    """
    name, _ = split_spec(spec)
    if name not in GATES and name not in find_plugins("knowgate.gates"):
        gate_folder.reject_other_folder(spec)


def load_fitted_gate(folder: str, *, plug_in: bool = False, verdict: gate_folder.Verdict = "need") -> FittedGate:
    """Load a gate from a folder that `knowgate fit` wrote.

    Args:
        folder: Folder of the gate.
        plug_in: Allow the gate to be used with a different LLM than the one it was fitted on.
        verdict: How the gate decides. 'need' compares the calibrated need for retrieval (0 to 1) with the threshold of
            the gate. 'own' compares the uncalibrated score of its classifier with 0.5.
    """
    artifact = gate_folder.read_artifact(folder)
    name = str(artifact.manifest["gate"]).split(":")[0]  # without options, which follow a colon
    gate_class = _check_class(name, load_entry(FITTED_GATES, "fitted gate", name, "knowgate.fitted_gates"))
    gate = cast("type[FittedGate]", gate_class).from_artifact(artifact, plug_in)
    return replace(gate, verdict=verdict)


def _check_class(name: str, loaded: object) -> type[Gate]:
    """Check that a plugin provides a gate class, and return the class.

    Raises:
        BadSetting: The object is not a subclass of `Gate`.
    """
    if not (isinstance(loaded, type) and issubclass(loaded, Gate)):
        raise BadSetting(
            f"the plugin for gate '{name}' provides {loaded!r}, not a gate class. Make it a subclass of knowgate.Gate."
        )
    return loaded


def default_gate(model: Model, prompts: str | None = None) -> Gate:
    """Return the gate to use for a model by default.

    This is a packaged gate for exactly these weights and prompts, or else 'logprob:first'. Models that return only text
    get 'always:rules'.

    Args:
        model: The LLM that the gate decides for.
        prompts: Fingerprint of the answer prompts. Default: the prompts of knowgate.

    Example:
        >>> from knowgate.models.fake import FakeModel
        >>> default_gate(FakeModel()).name
        'logprob'
    """
    prompts = load_packaged_templates("answer").fingerprint if prompts is None else prompts
    # Packaged gates need hidden states, so models without layers (depth 0) are skipped. This also avoids computing
    # the fingerprint of a served model, which is slow.
    if model.depth > 0:
        for folder in sorted(path.parent for path in PACKAGED_GATES.glob("*/gate.json")):
            fitted_on = gate_folder.read_artifact(folder).manifest
            if fitted_on["model"]["fingerprint"] == model.fingerprint and fitted_on["prompts"] == prompts:
                return load_fitted_gate(str(folder))
    return load_gate(TEXT_ONLY_GATE if is_text_only(model) else FALLBACK_GATE)


def is_text_only(model: Model) -> bool:
    """Return whether a model returns text without the log-probabilities of its tokens."""
    return Signal.LOGPROBS not in model.offers


def describe_text_only(model: str) -> str:
    """Say which gate is used for a text-only model, and how to save searches."""
    return (
        f"{model} returns text without log-probabilities, so knowgate retrieves for every question except small talk and "
        f"the like (the gate `{TEXT_ONLY_GATE}`). To save searches, label questions and fit a policy with `knowgate fit`. "
        "Without labels, use the gate `consistency`: it asks the LLM each question three more times and compares the answers."
    )
