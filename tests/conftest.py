"""One thread: the tensors of these tests are so small that more threads only wait for each other."""

import torch

torch.set_num_threads(1)
