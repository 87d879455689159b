# A process below this one that has left its session and does not listen to SIGTERM; both write their numbers into $PIDS.
echo $$ > "$PIDS/child"
setsid sh -c 'trap "" TERM HUP INT; echo $$ > "$PIDS/grandchild"; sleep 600 & sleep 600' &
wait
