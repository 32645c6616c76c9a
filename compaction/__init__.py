"""The ground floor: history, window, summaries, the agent loop and the rollouts it makes.

Imports no torch, Ray, Prefect or MLflow. Everything above speaks in the types of this package.
"""
