"""What every environment that steps on the host shares: its protocol, rows of observations, infos."""
