"""Worker processes on this machine: they start, send messages, share memory, and end with their parent."""
