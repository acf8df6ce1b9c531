"""What each Prefect task calls: references in, work, a stage record out. One file a stage; no Prefect here."""
