"""A language model of bytes and its texts, Python's help topics, which every installation has.

train_dsa.py, train_v4.py and train_context_parallel.py use it; it is no program of its own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Block(nn.Module):
    """Attention and a two-layer network, each with a norm and a residual connection."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.before = nn.RMSNorm(dim)
        self.attention = attention
        self.network = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        mixed, index_loss = self.attention(self.before(x), rope=rope)
        x = x + mixed
        return x + self.network(x), index_loss


class Model(nn.Module):
    """A language model: takes bytes, returns logits of the next byte and the indexers' losses.

    Args:
        attentions: the attention layers of fusion_attention.nn, one for each block.
        rope: the table of rotary embeddings.
    """

    def __init__(self, dim: int, attentions: Iterable[nn.Module], rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, attention) for attention in attentions)
        self.head = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False))
        self.rope = rope

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, index_loss = self.embed(tokens), torch.zeros(())
        for block in self.blocks:
            x, loss = block(x, self.rope)
            index_loss = index_loss + loss
        return self.head(x), index_loss


def read_text() -> Tensor:
    """Returns the help topics of this Python, as bytes."""
    from pydoc_data.topics import topics

    return torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))


def draw(text: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns random (bytes, next bytes) of [batch, context]; the same for the same seed."""
    starts = torch.randint(len(text) - context, (batch,), generator=torch.Generator().manual_seed(seed))
    rows = text[starts[:, None] + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def held_out_loss(model: Model, text: Tensor, batch: int, context: int, batches: int = 8) -> float:
    """Returns the cross entropy per byte of held-out text, in the model's current stage."""
    model.eval()
    losses = []
    for seed in range(batches):
        tokens, following = draw(text, batch, context, seed)
        losses.append(cross_entropy(model(tokens)[0].flatten(0, 1), following.flatten()).item())
    model.train()
    return sum(losses) / len(losses)
