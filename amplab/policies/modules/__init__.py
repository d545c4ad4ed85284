"""Policies on models: hooks around a model's forward, and around modules with a rule of their own."""

__all__: list[str] = []
