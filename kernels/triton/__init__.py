"""Triton implementations; the only package that imports triton."""
