"""Settings that hold for every test."""

import torch

# The shapes here are small: handing work to a second thread costs more than it saves, and varies from run to run.
torch.set_num_threads(1)
