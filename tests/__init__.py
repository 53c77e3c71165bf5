"""Tests of experiential."""
