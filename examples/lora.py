"""Train small adapters beside frozen weights with peft, then merge them: LoRA.

    pip install peft
    python examples/lora.py

This command prints which share of the parameters is trained, and how far the merged
model is from the adapted model. All projections are `nn.Linear`, so peft can adapt them.
In a `LanguageModel`, the head can be adapted, too, unless it is tied to the embedding.
Over several processes, add the adapters before `parallelize`, and use only "dp".
Source: Hu et al., "LoRA" (arXiv 2106.09685).
"""

import torch
from peft import LoraConfig, get_peft_model

from tinyblock import Transformer

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]


def main() -> None:
    torch.manual_seed(0)
    model = Transformer(2, d_model=64, num_heads=4, max_seq_len=128)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=PROJECTIONS))
    adapted.print_trainable_parameters()

    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for _ in range(2):
        x = torch.randn(4, 16, 64)
        (adapted(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = adapted(x)
    merged = adapted.merge_and_unload()
    difference = (merged(x) - expected).abs().max()
    print(f"merged {type(merged).__name__}: {difference:.0e}")


if __name__ == "__main__":
    main()
