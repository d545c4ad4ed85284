"""The numbers that an optimizer is made with, checked before it is made."""

from collections.abc import Sequence

__all__ = ["check_betas", "check_not_negative", "check_shares"]


def check_not_negative(optimizer: str, **numbers: float) -> None:
    """Refuse a number below 0, by its name.

    Raises:
        ValueError: there is one.

    >>> check_not_negative("FusedAdagrad", lr=-1.0)
    Traceback (most recent call last):
        ...
    ValueError: lr=-1.0: FusedAdagrad expected a number >= 0; -lr was perhaps meant to be lr.
    """
    for name, number in numbers.items():
        if not number >= 0.0:
            raise ValueError(
                f"{name}={number}: {optimizer} expected a number >= 0; -{name} was perhaps meant to be {name}."
            )


def check_shares(optimizer: str, **numbers: float) -> None:
    """Refuse a number outside [0, 1), by its name.

    Raises:
        ValueError: there is one.
    """
    for name, number in numbers.items():
        if not 0.0 <= number < 1.0:
            raise ValueError(f"{name}={number}: {optimizer} expected a number in [0, 1), such as 0.9.")


def check_betas(optimizer: str, betas: Sequence[float]) -> None:
    """Refuse all but two numbers in [0, 1).

    Raises:
        ValueError: there are others.
    """
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas}: {optimizer} expected two numbers in [0, 1), such as (0.9, 0.999).")
