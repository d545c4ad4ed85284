"""A file of one's own, beside that of the training loop, with a variable that a step counts in."""

import torch

step = 0
drawn = []
generator = torch.Generator()


def next_step():
    """Count a step."""
    global step  # noqa: PLW0603 - as in a script
    step += 1
    drawn.append(step)
    return step
