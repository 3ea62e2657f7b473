#!/bin/bash
# Checks step.pml in all configurations: the protocol must pass, every naive variant must be caught.
# Needs spin and gcc (apt-get install spin gcc). About two minutes on 2 cores; two checks at a time, each below 1.9 GB.
#     ./check.sh            all
#     ./check.sh PATTERN    only the lines whose flags match (grep -E), and the story of each run that ends badly
# Prints a table, the one in docs/protocol.md; the exit status is 1 if a line is not as expected.
set -u
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
for tool in spin gcc; do command -v $tool >/dev/null || { echo "$tool is missing: apt-get install spin gcc" >&2; exit 2; }; done

A=-DABORTS=1 E=-DERRORS=1 X=-DDEATHS=1 S=-DSIGNALS=1
list() {                                             # a budget is "up to": a pair covers its single ones
    for depth in 0 1; do
        p="pass|-DN=2 -DDEPTH=$depth"
        for more in "" "$A $E $X $S" "-DSIGNALS=2" "-DR=3 -DMAXTOK=3 -DABORTS=2" "-DFINE"; do echo "$p $more"; done
        [ $depth = 1 ] && for more in "$A" "$E" "$X" "$S"; do echo "$p -DFINE $more"; done
        p="pass|-DN=3 -DDEPTH=$depth"
        for more in "" "$A $E" "$A $S" "$A $X" "$E $S" "$E $X" "$S $X" "-DSIGNALS=2" "-DR=3 -DMAXTOK=3" "-DFINE"; do echo "$p $more"; done
    done
    cat <<END
catch|-DN=2 -DDEPTH=0 -DPATCH_OWN
catch|-DN=2 -DDEPTH=1 -DPATCH_OWN
catch|-DN=2 -DDEPTH=0 -DGRAPH_LOCAL
catch|-DN=2 -DDEPTH=1 -DGRAPH_LOCAL
catch|-DN=2 -DDEPTH=0 -DIDLE_RETURNS
catch|-DN=3 -DDEPTH=1 -DIDLE_RETURNS
catch|-DN=2 -DDEPTH=0 $E -DRAISE_NO_VOTE
catch|-DN=2 -DDEPTH=1 $E -DRAISE_NO_VOTE
catch|-DN=2 -DDEPTH=1 $E -DROOT_SILENT
catch|-DN=2 -DDEPTH=0 $E -DVOTE_ONLY
catch|-DN=2 -DDEPTH=1 $E -DVOTE_ONLY
catch|-DN=3 -DDEPTH=0 $A -DABORT_ASYNC
catch|-DN=3 -DDEPTH=1 $A -DABORT_ASYNC
catch|-DN=2 -DDEPTH=0 $A -DABORT_LATE
catch|-DN=2 -DDEPTH=1 $A -DABORT_LATE
catch|-DN=2 -DDEPTH=1 -DEOS_AT_ONCE
catch|-DN=2 -DDEPTH=1 $A -DLEAK_ABORT
catch|-DN=2 -DDEPTH=1 -DIDLE_LOCAL
catch|-DN=2 -DDEPTH=1 -DIDLE_ROOT
catch|-DN=2 -DDEPTH=1 -DIDLE_BY_TOKENS
catch|-DN=2 -DDEPTH=1 -DIDLE_IN_FLIGHT
catch|-DN=2 -DDEPTH=1 -DIDLE_TIMEOUT
catch|-DN=3 -DDEPTH=0 -DIDLE_TIMEOUT
catch|-DN=2 -DDEPTH=1 -DEXIT_ROOT
catch|-DN=2 -DDEPTH=0 -DEXIT_ROOT
catch|-DN=2 -DDEPTH=1 -DNEWS_POLLED
catch|-DN=3 -DDEPTH=0 -DNEWS_POLLED
catch|-DN=2 -DDEPTH=1 $S -DSTOP_NO_WAKE
catch|-DN=3 -DDEPTH=1 $S -DSTOP_LOCAL
catch|-DN=2 -DDEPTH=0 $E -DOUT_BLOCKS
catch|-DN=2 -DDEPTH=1 $E -DOUT_BLOCKS
catch|-DN=2 -DDEPTH=1 $E -DGATHER_AT_COLLECT
catch|-DN=3 -DDEPTH=1 -DKV_LOCAL
catch|-DN=2 -DDEPTH=1 $S -DNO_FAREWELL
catch|-DN=2 -DDEPTH=1 $E -DNO_FAREWELL
catch|-DN=2 -DDEPTH=1 $X -DIDLE_NO_BEAT
limit|-DN=3 -DDEPTH=1 $X -DPARTIAL_FAREWELL
END
}

one() {                                              # one configuration -> one line of the table
    want=${1%%|*} flags=$(echo ${1#*|}) dir=$(mktemp -d -p "$work")
    cd "$dir" && cp "$here/step.pml" . || exit 1
    [ "$want" = pass ] && opt=-O1 || opt=-O0
    if ! spin -a $flags step.pml >log 2>&1 || ! gcc $opt -w -DSAFETY -DCOLLAPSE -DNOFAIR -DMEMLIM=1900 -DVECTORSZ=2048 -o pan pan.c 2>>log; then
        cat log >&2; result="does not compile"
    else
        timeout 150 ./pan -m100000 >out 2>&1; rc=$?
        states=$(awk '/states, stored/ {print $1; exit}' out)
        why=$(grep -m1 '^pan:1:' out)
        case $why in
            "")                    result=pass ;;
            *"desc["*)             result="mismatched collective" ;;
            *"invalid end"*)       result="hang" ;;
            *"n<(8"*)              result="livelock" ;;
            *"code_of["*)          result="exit codes differ" ;;
            *"res[i]"*)            result="request forgotten" ;;
            *"free_at_exit"*)      result="block leak" ;;
            *"abort_step["*)       result="aborted sequence still scheduled" ;;
            *"assertion violated 0"*|*"got["*) result="token after the end" ;;
            *"q_len(outputs)"*)    result="message left behind" ;;
            *"table[x].tok"*)      result="ranks of one group differ" ;;
            *)                     result="other: $why" ;;
        esac
        if [ $rc -ne 0 ] || ! grep -q 'errors:' out || grep -q 'max search depth too small\|out of memory\|Search not completed' out && [ "$result" = pass ]; then
            result="not completed"
        fi
    fi
    case $want:$result in pass:pass) ok=ok ;; pass:*) ok=BAD ;; *:pass|*:"not completed"|*:"does not compile"|*:other*) ok=BAD ;; *) ok=ok ;; esac
    printf '| %s | %s | %s | %s | %s |\n' "$(echo $flags | sed 's/-D//g')" "${states:--}" "$want" "$result" "$ok"
    if [ "${TRACE:-0}" = 1 ] && [ -f step.pml.trail ]; then
        spin -t $flags step.pml 2>/dev/null | grep -E 'rank [0-9]|assert|blocked'
    fi
    rm -rf "$dir"
}
export -f one; export here work
[ $# -gt 0 ] && export TRACE=1
echo '| configuration | states | expected | result | |'
echo '| --- | --- | --- | --- | --- |'
list | grep -E -e "${1:-.}" | nl -ba -w4 -s'|' | xargs -d '\n' -P 2 -I{} \
    bash -c 'n=$(echo ${1%%|*}); one "${1#*|}" >"$work/$(printf %04d "$n").row"' _ {}
cat "$work"/*.row
bad=$(cat "$work"/*.row | grep -c '| BAD |$')
echo; echo "$(cat "$work"/*.row | grep -c '^| .*|$') configurations, $bad not as expected"
[ "$bad" -eq 0 ]
