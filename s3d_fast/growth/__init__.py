"""Growing a network: training, phases, the folder of a run, and grown networks on disk."""
