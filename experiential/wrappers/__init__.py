"""Gymnasium wrappers: text from any environment, experience for any agent."""

from experiential.envs.text_env import UnicodeText
from experiential.wrappers.experience import ExperienceWrapper
from experiential.wrappers.feedback import FeedbackWrapper
from experiential.wrappers.reflection import ReflectionWrapper
from experiential.wrappers.search_and_ask import SearchAndAskWrapper
from experiential.wrappers.text_observation import TextObservation
from experiential.wrappers.vector import ExperienceVectorWrapper

__all__ = [
    "ExperienceVectorWrapper",
    "ExperienceWrapper",
    "FeedbackWrapper",
    "ReflectionWrapper",
    "SearchAndAskWrapper",
    "TextObservation",
    "UnicodeText",
]
