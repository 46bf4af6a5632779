"""What trust costs and what it catches: signing, verifying, spot checks. See ``docs/verification.md``."""
