"""Connectors: how models and engines get at published KV. The only packages of p2pkv that import torch."""
