"""The Airflow side of verl_workflow. Imports neither ray, torch nor verl."""
