"""Evaluation beside a run: whole episodes in a separate process."""

from funcollect.evaluation.evaluator import Evaluation, Evaluator

__all__ = ["Evaluation", "Evaluator"]
