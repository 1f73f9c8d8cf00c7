"""Evaluation beside a run: whole episodes in a process of their own."""

from funcollect.evaluation.evaluator import Evaluation, Evaluator

__all__ = ["Evaluation", "Evaluator"]
