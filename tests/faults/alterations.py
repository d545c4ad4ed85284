"""Random alterations of what a program reads: of bytes, and of the values of a nested structure."""

import math
import zipfile

import torch

STRANGE = (
    None, True, False, 0, -1, 1, 7, 2**31, 10**30, -(2**63), 0.5, -0.5, 1e300, math.nan, math.inf, -math.inf,
    "", "text", "nan", "\x1b[31m", "a\x00b", "\ud800", "\u202egnp", "9" * 400, b"bytes",
    (), [], {}, [[]], {"a": 1}, [1, "two"],
)  # fmt: skip


def altered_bytes(content, random):
    """Return bytes with one alteration: some flipped, cut off, doubled, removed or replaced."""
    content = bytearray(content)
    at = random.randrange(len(content))
    upto = min(len(content), at + random.choice((1, 2, 8, 100)))
    match random.randrange(5):
        case 0:
            for place in range(at, upto):
                content[place] = random.randrange(256)
        case 1:
            content[at] ^= 1 << random.randrange(8)
        case 2:
            del content[at:]
        case 3:
            content[at:at] = content[at:upto]
        case 4:
            del content[at:upto]
    return bytes(content)


def altered_archive(path, random):
    """Alter the bytes of one member of a zip archive, with checksums that are valid again."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chosen = random.choice([name for name, content in members.items() if content])
    pickled = next(name for name in members if name.endswith("data.pkl"))
    chosen = random.choice((chosen, pickled))
    members[chosen] = altered_bytes(members[chosen], random)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def altered_tensor(tensor, random):
    """Return another tensor in the place of one: of another kind, shape or layout, or with other values."""
    choices = (
        lambda: tensor.to(torch.int8),
        tensor.bool,
        lambda: tensor.to(torch.complex64),
        lambda: tensor.double() * 1e300,
        lambda: tensor.reshape(-1)[:1],
        lambda: tensor[None],
        lambda: torch.zeros(0),
        lambda: torch.empty(tensor.shape, device="meta"),
        lambda: tensor.float().to_sparse() if tensor.dim() else tensor.float(),
        lambda: torch.full(tensor.shape, math.nan),
        lambda: -tensor.float(),
    )
    return random.choice(choices)()


def altered(value, random):
    """Return a copy of a nested structure with one alteration in a random place of it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    keys = [key for key, _ in inner]
    if keys and random.random() < 0.85:
        key = random.choice(keys)
        changed = dict(value) if isinstance(value, dict) else list(value)
        match random.randrange(12):
            case 0:
                del changed[key]
            case 1 if isinstance(changed, dict):
                changed[random.choice((7, "other", None, key))] = changed.pop(key)
            case 1:
                changed.insert(key, random.choice(STRANGE))
            case _:
                changed[key] = altered(changed[key], random)
        return tuple(changed) if isinstance(value, tuple) else changed
    if isinstance(value, torch.Tensor) and random.random() < 0.8:
        return altered_tensor(value, random)
    return random.choice(STRANGE)
