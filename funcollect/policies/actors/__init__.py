"""What a loop calls at each step: the actor protocol, its checks, and the actor of a plain policy."""
