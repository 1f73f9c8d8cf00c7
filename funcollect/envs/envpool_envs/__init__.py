"""EnvPool environments."""
