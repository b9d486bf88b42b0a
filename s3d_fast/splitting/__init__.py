"""From spectra to a larger network: selection, the plan, and surgery."""
