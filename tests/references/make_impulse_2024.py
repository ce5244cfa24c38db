"""Algorithm 1 of the 2024 paper as its program runs it, with PyTorch's LayerNorm, MSE and Adam.

With the same offsets and initial values, `impulse_init` of the authors' program
(osiriszjq/structured_init, commit 9c2d0e0, on a CPU) returns the same Q and K.
"""

import torch

ROWS, COLS, WIDTH, HEADS, HEAD_DIM = 5, 5, 32, 4, 8
OFFSETS = ((0, 0), (-1, 1), (1, 0), (0, -1))
STEPS = 300  # rescaled at 0, 100 and 200


def sincos():
    """Channels sin y, sin x, cos y, cos x."""
    quarter = WIDTH // 4
    frequencies = 1 / 10_000 ** (torch.arange(quarter) / quarter)
    y = torch.arange(ROWS).repeat_interleave(COLS)[:, None] * frequencies
    x = torch.arange(COLS).repeat(ROWS)[:, None] * frequencies
    return torch.cat([y.sin(), x.sin(), y.cos(), x.cos()], dim=1)


def targets():
    maps = torch.zeros(HEADS, ROWS, COLS, ROWS, COLS)
    for head, (dy, dx) in enumerate(OFFSETS):
        for y in range(max(0, -dy), min(ROWS, ROWS - dy)):
            for x in range(max(0, -dx), min(COLS, COLS - dx)):
                maps[head, y, x, y + dy, x + dx] = 1
    return maps.reshape(HEADS, ROWS * COLS, ROWS * COLS)


def make():
    """All arrays by name."""
    torch.manual_seed(0)
    positions = sincos()
    bound = (1 / (HEAD_DIM * HEADS)) ** 0.5
    query = torch.nn.Parameter(bound * (2 * torch.rand(HEADS, WIDTH, HEAD_DIM) - 1))
    key = torch.nn.Parameter(bound * (2 * torch.rand(HEADS, HEAD_DIM, WIDTH) - 1))
    arrays = {"positions": positions, "query/start": query.clone(), "key/start": key.clone()}
    x = torch.nn.functional.layer_norm(positions, [WIDTH])
    norm = query.detach().norm(dim=1).mean()
    adam = torch.optim.Adam([query, key], lr=1e-4)
    losses = []
    for step in range(STEPS):
        if step % 100 == 0:
            for factor in (query.data, key.data):
                factor *= norm / factor.norm(dim=1, keepdim=True)
        logits = HEAD_DIM**-0.5 * x @ query @ key @ x.T
        loss = torch.nn.functional.mse_loss(logits.softmax(dim=-1), targets())
        losses.append(loss.detach())
        adam.zero_grad()
        loss.backward()
        adam.step()
    arrays |= {"targets": targets(), "losses": torch.stack(losses), "query": query, "key": key}
    return {name: array.detach().numpy() for name, array in arrays.items()}
