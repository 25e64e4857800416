"""Evaluation of models on tasks with known answers. Above `dtgpt.inference`, below training and serving."""
