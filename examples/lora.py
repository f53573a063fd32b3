"""LoRA with peft: train small adapters beside frozen weights, then merge them.

    python examples/lora.py

This command prints the share of the parameters that is trained, and how far the merged
model is from the adapted model, about 1e-6.

All projections are `nn.Linear`, so peft can adapt them.
Source: Hu et al., "LoRA" (arXiv 2106.09685).
"""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from tinyblock import Transformer

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]


def add_adapters(model: nn.Module) -> PeftModel:
    """Freeze the weights, and add an adapter of rank 8 to each projection."""
    config = LoraConfig(r=8, target_modules=PROJECTIONS)
    return get_peft_model(model, config)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Train the model to return its input."""
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    model = add_adapters(Transformer(2, d_model=64, num_heads=4, max_seq_len=128))
    trained = sum(parameter.numel() for parameter in trained_parameters(model))
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"trains {trained / total:.0%} of {total} parameters")

    optimizer = torch.optim.AdamW(trained_parameters(model))
    for _ in range(2):
        train_step(model, optimizer, torch.randn(4, 16, 64))

    x = torch.randn(4, 16, 64)
    adapted = model(x)
    merged = model.merge_and_unload()
    difference = (merged(x) - adapted).abs().max()
    kind = type(merged).__name__
    print(f"merged model: a {kind}, {difference:.0e} from the adapted model")


if __name__ == "__main__":
    main()
