"""`unscale_` on the same tensors step after step, prepared once: gradients that keep their place.

    flat = FlatGradients(params);  table = TensorTable(flat.buffers)          or, with zero_grad(set_to_none=False),
    table = TensorTable([param.grad for param in params])
    table.unscale_(found_inf, inv_scale)

For gradients that are made anew at each step take a `ParameterList`.
"""

from collections.abc import Sequence

from torch import Tensor

from amplab.kernels.remembered import Remembered
from amplab.kernels.unscale import unscale_

__all__ = ["TensorTable"]


class TensorTable:
    """A list of tensors, known to the kernels where there are kernels for them, and to `unscale_` everywhere.

    Args:
        tensors: as `unscale_`; held as long as this object is, by the kernels too, so that
            `torch.utils.swap_tensors` refuses them.

    Raises:
        TypeError: a tensor instead of a list, or what is no tensor in it.

    >>> import torch
    >>> grads = [torch.tensor([2.0, 4.0]), torch.tensor([8.0])]
    >>> table = TensorTable(grads)
    >>> table.unscale_(torch.zeros(1), torch.tensor([0.5]))
    >>> grads[0].tolist(), len(table)
    ([1.0, 2.0], 2)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if isinstance(tensors, Tensor):
            raise TypeError("TensorTable got a Tensor: expected a list of them; pass [tensor].")
        self._tensors = list(tensors)
        for index, tensor in enumerate(self._tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"tensors[{index}] is a {type(tensor).__name__}: TensorTable expected tensors; leave it out."
                )
        self._remembered = Remembered(self._tensors, hold=True)

    def __len__(self) -> int:
        return len(self._tensors)

    def unscale_(
        self,
        found_inf: Tensor,
        inv_scale: Tensor,
        *,
        norm: Tensor | None = None,
        norms: Tensor | None = None,
        first_bad: Tensor | None = None,
    ) -> None:
        """Do what `unscale_` does with the list, to the same bits.

        Where a tensor lies is looked up at each call: one that was resized or given other storage is found there.

        Args and Raises: as `unscale_`.

        Sync: none.
        """
        found = {"norm": norm, "norms": norms, "first_bad": first_bad}
        if self._remembered.unscale_(found_inf, inv_scale, gradients=False, **found) is None:
            unscale_(self._tensors, found_inf, inv_scale, **found)
