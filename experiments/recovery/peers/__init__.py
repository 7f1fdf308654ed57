"""The same model, killed the same way, under torchrun and under TorchFT: what a loss costs there."""
