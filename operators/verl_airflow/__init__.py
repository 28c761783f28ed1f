"""The Airflow side of verl_workflow: tasks that run pipelines on a Ray cluster, and outlive what runs them.

Of its modules `operators`, `sensors`, `triggers`, `hook` and `links` are public; `provider` tells Airflow of them.
Imports neither ray, torch nor verl.
"""
