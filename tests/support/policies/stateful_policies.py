"""Policies on a TensorDict that read what they wrote at the step before."""

import torch
from tensordict.nn import TensorDictModuleBase


class Count(TensorDictModuleBase):
    """Counts its calls in a key that it does not announce."""

    in_keys = ("observation",)
    out_keys = ("action", "count")

    def forward(self, td):
        count = td.get("count", None)
        count = torch.zeros(td.batch_size, dtype=torch.long) if count is None else count + 1
        return td.update({"count": count, "action": td["observation"][..., 2].gt(0).long()})
