"""TorchRL's environments."""
