# Makes a database of PostgreSQL for pgbench in the directory $1/database.
set -e
cd /
PATH=$(echo /usr/lib/postgresql/*/bin):$PATH
as='setpriv --reuid=postgres --regid=postgres --clear-groups'
chown postgres $1
$as initdb -D $1/database -A trust --locale=C.UTF-8
$as pg_ctl -D $1/database -w -o "-c listen_addresses= -c unix_socket_directories=$1" start
pgbench -i -q -h $1 -U postgres postgres
$as pg_ctl -D $1/database -w stop
