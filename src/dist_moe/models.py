"""The routed experts of known models, by name: what the command line plans and the benchmarks measure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The experts of a model, without biases: hidden D, intermediate F, E experts, K of them a token."""

    name: str
    D: int
    F: int
    E: int
    K: int


MODELS = (
    Shape("deepseek-v3", 7168, 2048, 256, 8),
    Shape("qwen3-30b", 2048, 768, 128, 8),
    Shape("qwen3-235b", 4096, 1536, 128, 8),
    Shape("mixtral-8x7b", 4096, 14336, 8, 2),
    Shape("gpt-oss-120b", 2880, 2880, 128, 4),
)


def find(name: str) -> Shape:
    """The model of this name; ValueError lists the known ones."""
    for model in MODELS:
        if model.name == name.casefold():
            return model
    raise ValueError(f"unknown model {name!r}; known are {', '.join(model.name for model in MODELS)}")
