"""Train on a Ray cluster: vLLM generates and DeepSpeed trains, through parts of OpenRLHF."""
